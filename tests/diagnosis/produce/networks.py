"""Failures of building, compiling and running networks on a CPU. Run: python -m diagnosis.produce NAME."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn, ops


def ids(batch: int = 2, length: int = 8, vocab: int = 16) -> ms.Tensor:
    return ms.Tensor(np.arange(batch * length).reshape(batch, length) % vocab, ms.int32)


def gpt_config(**changes):
    from mindformers.parallel_core.transformer_config import TransformerConfig

    values = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": 16,
        "seq_length": 8,
        "position_embedding_type": "learned_absolute",
        "use_eod_reset": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "compute_dtype": "float32",
        "add_bias_linear": True,
    }
    return TransformerConfig(**{**values, **changes})


def gpt_model(config, fused_norm: bool = False):
    from mindformers.core.context.build_context import build_context
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
    )
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
    from mindformers.tools.register import MindFormerConfig

    build_context(
        MindFormerConfig(
            use_legacy=False,
            use_parallel=False,
            context={"mode": ms.get_context("mode"), "device_target": "CPU"},
            parallel={"parallel_mode": 0},
        )
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(fused_norm=fused_norm),
        vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=True,
    )


def gpt_forward(mode: int, **changes) -> None:
    ms.set_context(mode=mode, device_target="CPU")
    model = gpt_model(gpt_config(**changes))
    positions = ms.Tensor(np.broadcast_to(np.arange(8), (2, 8)).copy(), ms.int32)
    mask = ms.Tensor(np.ones((2, 8)), ms.float32)
    out = model(input_ids=ids(), position_ids=positions, labels=ids(), loss_mask=mask)
    out[0].asnumpy()


def flash_attention_cpu() -> None:
    gpt_forward(ms.GRAPH_MODE)


def morph_pynative() -> None:
    gpt_forward(ms.PYNATIVE_MODE)


class NoSelf(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ms.Tensor(np.ones(3), ms.float32), name="weight")

    def construct(s, x):
        return x * s.weight


def construct_without_self() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    NoSelf()(ms.Tensor(np.ones(3), ms.float32)).asnumpy()


class MatMul(nn.Cell):
    def construct(self, x, y):
        return ops.matmul(x, y)


class Product(nn.Cell):
    def __init__(self):
        super().__init__()
        self.product = ops.MatMul()

    def construct(self, x, y):
        return self.product(x, y)


def bfloat16_matmul() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    x = ms.Tensor(np.ones((4, 4)), ms.bfloat16)
    Product()(x, x).float().asnumpy()


def bfloat16_matmul_ext() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    x = ms.Tensor(np.ones((4, 4)), ms.bfloat16)
    MatMul()(x, x).float().asnumpy()


def float16_double_matmul() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    x = ms.Tensor(np.ones((4, 4)), ms.float16)
    y = ms.Tensor(np.ones((4, 4)), ms.float32)
    ops.MatMul()(x, y).asnumpy()


def matmul_shapes() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ops.MatMul()(ms.Tensor(np.ones((4, 3)), ms.float32), ms.Tensor(np.ones((4, 3)), ms.float32)).asnumpy()


class Deep(nn.Cell):
    def construct(self, x):
        return self.down(x, 2000)

    def down(self, x, n):
        if n == 0:
            return x
        return self.down(x + 1, n - 1)


def call_depth() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    Deep()(ms.Tensor(np.ones(3), ms.float32)).asnumpy()


class TwoNamesakes(nn.Cell):
    def __init__(self):
        super().__init__()
        pair = [ms.Parameter(ms.Tensor(np.ones(3), ms.float32), name="weight") for _ in range(2)]
        self.weights = ms.ParameterTuple(pair)

    def construct(self, x):
        return x * self.weights[0]


def duplicate_parameter() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    TwoNamesakes()(ms.Tensor(np.ones(3), ms.float32)).asnumpy()


class TypeJoin(nn.Cell):
    def construct(self, x, y):
        if x.sum() > 0:
            out = x
        else:
            out = y
        return out


def type_join() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    TypeJoin()(ms.Tensor(np.ones(3), ms.float32), ms.Tensor(np.ones(3), ms.int32)).asnumpy()


class Numpy(nn.Cell):
    def construct(self, x):
        return x + np.random.default_rng(0).normal(x)


def python_library_in_graph() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    Numpy()(ms.Tensor(np.ones(3), ms.float32)).asnumpy()


def exec_source() -> None:
    """A network whose source is no file (a notebook cell, exec): the graph parser cannot read it."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    scope = {"nn": nn, "__name__": "__main__"}
    exec("class Net(nn.Cell):\n    def construct(self, x):\n        return x + 1\n", scope)
    scope["Net"]()(ms.Tensor(np.ones(3), ms.float32)).asnumpy()


def numpy_two() -> None:
    """Run with NumPy 2 in front of the one that MindSpore was built against."""
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    x = ms.Tensor(np.ones((2, 3)), ms.float32)
    print(np.__version__, ops.reshape(x, (3, 2)).asnumpy())


def int_dropout() -> None:
    gpt_config(hidden_dropout=0)


def dtype_string() -> None:
    gpt_config(compute_dtype="torch.bfloat16")


def heads_not_divisible() -> None:
    gpt_config(num_attention_heads=25, hidden_size=1600, tensor_model_parallel_size=2)


def sequence_parallel_alone() -> None:
    gpt_config(sequence_parallel=True)


def activation_name() -> None:
    gpt_forward(ms.GRAPH_MODE, hidden_act="gelu_new")


def normalization_name() -> None:
    gpt_forward(ms.GRAPH_MODE, normalization="rms_norm")


def position_ids_missing() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    model = gpt_model(gpt_config())
    model(input_ids=ids(), labels=ids(), loss_mask=ms.Tensor(np.ones((2, 8)), ms.float32))


def fused_norm_cpu() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    from mindformers.parallel_core.training_graph.transformer.norm import get_norm_cls

    config = gpt_config(normalization="RMSNorm")
    norm = get_norm_cls(fused_norm=True)(config=config, dim=16)
    norm(ms.Tensor(np.ones((2, 8, 16)), ms.float32)).asnumpy()


def ascend_on_cpu() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    (ms.Tensor(np.ones(3), ms.float32) + 1).asnumpy()


def ascend_set_device() -> None:
    ms.set_device("Ascend", 0)
    (ms.Tensor(np.ones(3), ms.float32) + 1).asnumpy()


def gpu_on_cpu() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="GPU")
    (ms.Tensor(np.ones(3), ms.float32) + 1).asnumpy()


def semi_auto_cpu() -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=2, global_rank=0)
    MatMul()(ms.Tensor(np.ones((4, 4)), ms.float32), ms.Tensor(np.ones((4, 4)), ms.float32)).asnumpy()


def graph_kernel() -> None:
    """Run with the package `decorator` hidden (see __main__)."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU", enable_graph_kernel=True)

    class Net(nn.Cell):
        def construct(self, x):
            return ops.exp(x * 2.0 + 1.0) - x

    Net()(ms.Tensor(np.ones((64, 64)), ms.float32)).asnumpy()


def embedding_ids_outside() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    table = ms.Tensor(np.ones((16, 4)), ms.float32)
    ops.gather(table, ms.Tensor(np.array([3, 16]), ms.int32), 0).asnumpy()


def memory_limit() -> None:
    """Run with a limit on the address space (see __main__)."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    x = ms.Tensor(np.ones((2048, 2048)), ms.float32)
    MatMul()(x.tile((40, 1)), x.tile((1, 40))).asnumpy()


def scale_sense_negative() -> None:
    from mindformers.wrapper.wrapper import MFTrainOneStepCell

    net = MatMul()
    MFTrainOneStepCell(net, nn.SGD(nn.Dense(2, 2).trainable_params()), use_clip_grad=True, max_grad_norm=0)
