"""The smallest network with the four outputs of a GPTModel, and its twin in PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

VOCAB, HIDDEN, SEQ = 17, 12, 6


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """An embedding, two matrices, a bias and a norm's gain; float32."""
    rng = np.random.default_rng(seed)
    shapes = {
        "embedding.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, HIDDEN),
        "fc.bias": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "head.weight": (VOCAB, HIDDEN),
    }
    return {name: (0.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def batches(steps: int, rows: int, seed: int = 1, ragged: bool = False) -> list[list[np.ndarray]]:
    """input_ids, labels, loss_mask, position_ids [rows, SEQ] int32 each; ragged: rows differ in their tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(steps):
        ids, labels = rng.integers(0, VOCAB, (2, rows, SEQ)).astype(np.int32)
        mask = np.ones((rows, SEQ), np.int32)
        if ragged:
            mask = (np.arange(SEQ)[None, :] < rng.integers(1, SEQ + 1, rows)[:, None]).astype(np.int32)
        made.append([ids, labels, mask, np.tile(np.arange(SEQ, dtype=np.int32), (rows, 1))])
    return made


def mindspore_network(values: dict[str, np.ndarray], factor: float = 1.0) -> Any:
    """The network in MindSpore; `factor` multiplies its loss (an infinity makes every step overflow)."""
    import mindspore as ms
    from mindspore import nn, ops

    from mindferry.layers.portable import TokenLoss

    class Network(nn.Cell):
        def __init__(self):
            super().__init__()
            for name, value in values.items():
                setattr(self, name.replace(".", "_"), ms.Parameter(ms.Tensor(value), name=name))
            self.token_loss = TokenLoss()
            self.zero = ms.Tensor([0.0], ms.float32)
            self.factor = ms.Parameter(ms.Tensor([factor], ms.float32), "factor", requires_grad=False)

        def get_gpt_transformer_config(self):
            return SimpleNamespace()

        def construct(self, input_ids, labels, loss_mask, position_ids):
            x = ops.gather(self.embedding_weight, ops.reshape(input_ids, (-1,)), 0)
            x = ops.MatMul(transpose_b=True)(x, self.fc_weight) + self.fc_bias
            x = ops.tanh(x) * self.norm_weight
            logits = ops.MatMul(transpose_b=True)(x, self.head_weight)
            losses = self.token_loss(logits, ops.reshape(labels, (-1,)))
            mask = ops.cast(ops.reshape(loss_mask, (-1,)), ms.float32)
            total = ops.ReduceSum()(losses * mask) / ops.ReduceSum()(mask)
            return ops.reshape(total, (1,)) * self.factor, self.zero, self.zero, self.zero

    return Network()


def torch_parameters(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same values as torch parameters."""
    import torch

    return {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in values.items()}


def torch_losses(parameters: dict[str, Any], batch: list[np.ndarray]) -> Any:
    """Loss of every token [rows, SEQ], before the mask."""
    import torch

    ids, labels = (torch.from_numpy(value.astype(np.int64)).reshape(-1) for value in batch[:2])
    x = parameters["embedding.weight"][ids] @ parameters["fc.weight"].T + parameters["fc.bias"]
    logits = (torch.tanh(x) * parameters["norm.weight"]) @ parameters["head.weight"].T
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none").reshape(batch[0].shape)


def wrapped(
    network: Any,
    schedule: Any,
    *,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    decay: str = "AdamW",
    **settings: Any,
) -> Any:
    """mindformers' optimizer groups and AdamW in our training step, as its Trainer puts them together."""
    from mindformers.core.context.build_context import build_context
    from mindformers.core.optim import build_optim
    from mindformers.trainer.optimizer_grouped_parameters import get_optimizer_grouped_parameters
    from mindformers.wrapper import build_wrapper

    from mindferry.targets.run_yaml import tabled_block
    from mindferry.training import compat

    build_context(
        {"use_legacy": False, "context": {"mode": 0, "device_target": "CPU", "affinity_cpu_list": []}}
    )
    compat.register_wrappers()
    from mindferry.training.schedule import TabledLR

    block = tabled_block(schedule)
    block.pop("type")
    groups = get_optimizer_grouped_parameters(network, weight_decay, optimizer_type="AdamW")
    optimizer = build_optim(
        {"type": decay, "betas": list(betas), "eps": eps, "weight_decay": weight_decay},
        default_args={"params": groups, "learning_rate": TabledLR(**block)},
    )
    step = build_wrapper(
        {"type": "PortableTrainOneStepCell", **settings},
        default_args={"network": network, "optimizer": optimizer},
    )
    step.set_train()
    return step
