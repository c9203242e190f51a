"""Each row of docs/defaults.md, shown on the installed packages: when a default changes, its row is wrong."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs" / "defaults.md"


@pytest.fixture(autouse=True, scope="module")
def on_a_cpu() -> None:
    import mindspore as ms

    ms.set_context(device_target="CPU", mode=ms.PYNATIVE_MODE)


def default(function: Any, name: str) -> Any:
    return inspect.signature(function).parameters[name].default


def transformer_config(name: str) -> Any:
    from mindformers.parallel_core.transformer_config import TransformerConfig

    return {f.name: f.default for f in dataclasses.fields(TransformerConfig)}[name]


def test_adam_weight_decay_has_no_bias_correction() -> None:
    """Gradient 1, rate 0.1, first step: 0.1 in PyTorch and mindformers, 0.316 in nn.AdamWeightDecay."""
    import mindspore as ms
    import torch
    from mindformers.core.optim.adamw import AdamW
    from mindspore import nn

    moved = {}
    for name, cls in (("mindspore", nn.AdamWeightDecay), ("mindformers", AdamW)):
        parameter = ms.Parameter(ms.Tensor([1.0], ms.float32), name="p")
        cls([parameter], learning_rate=0.1, weight_decay=0.0)((ms.Tensor([1.0], ms.float32),))
        moved[name] = 1.0 - float(parameter.asnumpy()[0])
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0).step()
    assert moved["mindformers"] == pytest.approx(1.0 - float(weight), rel=1e-5)
    assert moved["mindspore"] == pytest.approx(0.1 * 0.1 / np.sqrt(0.001), rel=1e-4)


def test_epsilon_and_decay_of_adamw() -> None:
    import torch
    from mindformers.core.optim.adamw import AdamW
    from mindspore import nn

    from mindferry.recipes import huggingface, megatron, nanogpt

    assert default(torch.optim.AdamW.__init__, "eps") == 1e-8
    assert default(AdamW.__init__, "eps") == 1e-8
    assert default(nn.AdamWeightDecay.__init__, "eps") == 1e-6
    assert default(torch.optim.AdamW.__init__, "weight_decay") == 0.01
    assert default(AdamW.__init__, "weight_decay") == 0.0
    assert huggingface.DEFAULTS["weight_decay"] == 0.0
    assert megatron.DEFAULTS["weight_decay"] == 0.01
    assert nanogpt.DEFAULTS["weight_decay"] == 0.1


def test_which_tensors_decay() -> None:
    """One group with everything in PyTorch, matrices alone in mindformers."""
    import torch
    from mindformers.trainer.optimizer_grouped_parameters import get_optimizer_grouped_parameters
    from mindspore import nn

    layer = nn.Dense(2, 2)
    layer.weight.name, layer.bias.name = "fc.weight", "fc.bias"
    groups = get_optimizer_grouped_parameters(layer, 0.1)
    assert {p.name: g["weight_decay"] for g in groups for p in g["params"]} == {
        "fc.weight": 0.1,
        "fc.bias": 0.0,
    }
    plain = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), weight_decay=0.1).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in plain] == [(2, 0.1)]


def test_clipping_is_off_in_mindformers() -> None:
    from mindformers.wrapper import MFTrainOneStepCell

    from mindferry.recipes import huggingface, megatron, nanogpt

    assert default(MFTrainOneStepCell.__init__, "use_clip_grad") is False
    assert huggingface.DEFAULTS["max_grad_norm"] == megatron.DEFAULTS["clip_grad"] == 1.0
    assert nanogpt.DEFAULTS["grad_clip"] == 1.0


def test_clipping_leaves_small_gradients_alone() -> None:
    """mindformers scales them by 0.999999; PyTorch and our step do not."""
    import mindspore as ms
    import torch
    from mindformers.core.clip_grad import ClipGradNorm

    from mindferry.training.wrappers import ClipGlobalNorm

    for values in ([0.3, 0.4], [3.0, 4.0]):
        gradient = np.array(values, np.float32)
        ours, norm = ClipGlobalNorm(1.0)((ms.Tensor(gradient),))
        weight = torch.nn.Parameter(torch.zeros(2))
        weight.grad = torch.from_numpy(gradient.copy())
        expected = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        np.testing.assert_allclose(ours[0].asnumpy(), weight.grad.numpy(), rtol=1e-7)
        assert float(norm.asnumpy()[0]) == pytest.approx(float(expected), rel=1e-6)
    theirs, _ = ClipGradNorm(1.0)((ms.Tensor(np.array([0.3, 0.4], np.float32)),))
    assert float(theirs[0].asnumpy()[0] / np.float32(0.3)) == pytest.approx(1 - 1e-6, abs=2e-7)


def test_the_rate_of_the_first_update() -> None:
    from mindferry.recipes.schedule import rate
    from mindferry.spec import Schedule

    warm = {"learning_rate": 1.0, "warmup_steps": 9, "total_steps": 100}
    assert rate(Schedule(**warm), 0) == 0.0
    assert rate(Schedule(**warm, warmup_rule="(t+1)/(w+1)"), 0) == 0.1
    assert rate(Schedule(**warm, warmup_rule="max(1,t)/w"), 0) == pytest.approx(1 / 9)


def test_the_fused_adamw_asks_for_the_rate_of_step_minus_one() -> None:
    """mindformers' FusedAdamW counts from -1, and a warm-up has a negative rate there."""
    import mindspore as ms
    from mindformers.core.lr import LinearWithWarmUpLR

    source = inspect.getsource(__import__("mindformers.core.optim.fused_adamw", fromlist=["x"]))
    assert re.search(r"global_step.*-1", source), "the counter's start"
    schedule = LinearWithWarmUpLR(learning_rate=1.0, total_steps=100, warmup_steps=10)
    assert float(schedule(ms.Tensor(-1, ms.int32)).asnumpy()) == pytest.approx(-0.1)


def test_linear_decay_ends_at_zero_in_mindformers() -> None:
    from mindformers.core.lr import LinearWithWarmUpLR

    from mindferry.spec import Schedule
    from mindferry.targets import run_yaml

    assert "lr_end" not in inspect.signature(LinearWithWarmUpLR.__init__).parameters
    low = Schedule(kind="linear", learning_rate=1.0, min_learning_rate=0.1, total_steps=10)
    assert run_yaml.lr_schedule_block(low)["type"] == "PolynomialWithWarmUpLR"


def test_loss_scales() -> None:
    import torch
    from mindspore.amp import DynamicLossScaleManager

    from mindferry.recipes import megatron

    assert default(torch.amp.GradScaler.__init__, "init_scale") == 2.0**16
    assert default(torch.amp.GradScaler.__init__, "growth_interval") == 2000
    assert default(DynamicLossScaleManager.__init__, "init_loss_scale") == 2**24
    assert default(DynamicLossScaleManager.__init__, "scale_window") == 2000
    assert megatron.DEFAULTS["initial_loss_scale"] == 2.0**32
    assert megatron.DEFAULTS["loss_scale_window"] == 1000


def test_accumulation_is_reset() -> None:
    from mindformers.trainer.base_trainer import BaseTrainer

    source = inspect.getsource(BaseTrainer._check_grad_accumulation_steps)
    assert 'parallel_mode not in ["semi_auto_parallel", "auto_parallel"]' in re.sub(r"\s+", " ", source)
    assert source.rstrip().count("gradient_accumulation_steps = 1") >= 2


def test_gelu_is_approximated() -> None:
    """MindSpore's nn.GELU is the tanh form, PyTorch's the exact one."""
    import mindspore as ms
    import torch
    from mindspore import nn

    x = np.linspace(-4, 4, 401).astype(np.float32)
    theirs = nn.GELU()(ms.Tensor(x)).asnumpy()
    exact = torch.nn.GELU()(torch.from_numpy(x)).numpy()
    tanh = torch.nn.GELU(approximate="tanh")(torch.from_numpy(x)).numpy()
    assert np.abs(theirs - tanh).max() < 1e-5 < 4e-4 < np.abs(theirs - exact).max()


def test_layernorm_epsilon() -> None:
    import torch
    from mindspore import nn

    assert default(nn.LayerNorm.__init__, "epsilon") == 1e-7
    assert default(torch.nn.LayerNorm.__init__, "eps") == 1e-5
    assert transformer_config("layernorm_epsilon") == 1e-5


def test_embedding_initialisation() -> None:
    import torch
    from mindspore import nn

    assert nn.Embedding(2000, 64).embedding_table.asnumpy().std() == pytest.approx(0.01, rel=0.05)
    assert float(torch.nn.Embedding(2000, 64).weight.std()) == pytest.approx(1.0, rel=0.05)


def test_compute_dtype() -> None:
    import torch

    assert transformer_config("compute_dtype") == "bfloat16"
    assert transformer_config("softmax_compute_dtype") == "float32"
    assert torch.get_default_dtype() == torch.float32


def test_shuffle_and_last_batch() -> None:
    import mindspore.dataset as ds
    import torch

    data = ds.NumpySlicesDataset(list(range(40)), shuffle=None)
    order = [int(row[0]) for row in data.create_tuple_iterator(num_epochs=1, output_numpy=True)]
    assert order != sorted(order), "MindSpore shuffles unless told not to"
    assert default(torch.utils.data.DataLoader.__init__, "shuffle") is None
    assert not isinstance(torch.utils.data.DataLoader(list(range(4))).sampler, torch.utils.data.RandomSampler)
    assert default(torch.utils.data.DataLoader.__init__, "drop_last") is False


def test_bfloat16_has_no_matrix_product_on_a_cpu() -> None:
    import mindspore as ms
    from mindspore import ops

    x = ms.Tensor(np.ones((2, 2)), ms.bfloat16)
    with pytest.raises(TypeError, match="Select CPU operator"):
        ops.matmul(x, x).asnumpy()


def test_exp_on_a_cpu() -> None:
    """Off by 8e-6 relative; the loss of the portable layers does without it."""
    import mindspore as ms
    import torch
    from mindspore import ops

    x = np.linspace(-20, 0, 10001).astype(np.float32)
    error = np.abs(ops.exp(ms.Tensor(x)).asnumpy().astype(np.float64) / np.exp(x.astype(np.float64)) - 1)
    assert 1e-6 < error.max() < 2e-5
    theirs = torch.from_numpy(x).exp().numpy().astype(np.float64) / np.exp(x.astype(np.float64)) - 1
    assert np.abs(theirs).max() < 3e-7


def test_every_row_names_a_test_and_every_test_has_a_row() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`test_" in line]
    named = {name for line in rows for name in re.findall(r"`(test_\w+)`", line)}
    here = {name for name in globals() if name.startswith("test_")}
    here.remove("test_every_row_names_a_test_and_every_test_has_a_row")
    assert named == here
    assert len(rows) == len(here)
