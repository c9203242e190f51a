"""The training step on the kernels: AdamW against float64, and whole runs against the general step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mindferry import kernels
from mindferry.targets.run_directory import RunDirectory
from mindferry.training import compat, engine

from ..support import make_run, make_source

pytestmark = pytest.mark.skipif(not kernels.state().usable, reason=kernels.state().reason)


def adamw(value, mean, square, gradient, step, lr, betas, eps, decay):
    """torch.optim.AdamW in float64."""
    value = value * (1 - lr * decay)
    mean = betas[0] * mean + (1 - betas[0]) * gradient
    square = betas[1] * square + (1 - betas[1]) * gradient**2
    scale = np.sqrt(square / (1 - betas[1] ** step)) + eps
    return value - lr * (mean / (1 - betas[0] ** step)) / scale, mean, square


@settings(deadline=None, max_examples=8)
@given(
    shapes=st.lists(st.sampled_from([(1,), (3,), (17, 5), (64,), (33, 65)]), min_size=1, max_size=4),
    factor=st.sampled_from([1.0, 0.25, 1e-4]),
    seed=st.integers(0, 1000),
)
def test_adamw_is_torchs(shapes: list[tuple[int, ...]], factor: float, seed: int) -> None:
    import mindspore as ms

    from mindferry.training.kernel_step import KernelAdamW

    rng = np.random.default_rng(seed)
    start = [rng.standard_normal(shape) for shape in shapes]
    parameters = [ms.Parameter(ms.Tensor(v, ms.float32), name=f"p{i}") for i, v in enumerate(start)]
    groups = [
        {"params": parameters[:1], "weight_decay": 0.1},
        {"params": parameters[1:], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = KernelAdamW([*groups, {"order_params": parameters}], 1e-2, (0.9, 0.95), 1e-8)
    means, squares, values = [0.0] * len(start), [0.0] * len(start), list(start)
    for step in range(1, 4):
        gradients = [rng.standard_normal(shape) for shape in shapes]
        optimizer(tuple(ms.Tensor(g, ms.float32) for g in gradients), ms.Tensor([factor], ms.float32))
        for i, gradient in enumerate(gradients):
            values[i], means[i], squares[i] = adamw(
                values[i],
                means[i],
                squares[i],
                gradient * factor,
                step,
                1e-2,
                (0.9, 0.95),
                1e-8,
                0.1 * (i == 0),
            )
    for parameter, value in zip(parameters, values, strict=True):
        np.testing.assert_allclose(parameter.asnumpy(), value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("max_norm", [0.5, 1e30])
def test_norm_and_factor(max_norm: float) -> None:
    import mindspore as ms
    import torch

    from mindferry.training.kernel_step import Norm

    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (3,))]
    norm, factor, overflow = Norm(max_norm)(tuple(map(ms.Tensor, gradients)), ms.Tensor([8.0], ms.float32))
    ours = [torch.tensor(g / 8, requires_grad=True) for g in gradients]
    for tensor in ours:
        tensor.grad = tensor.detach().clone()
    theirs = torch.nn.utils.clip_grad_norm_(ours, max_norm)
    assert norm.asnumpy()[0] == pytest.approx(float(theirs), rel=1e-6)
    np.testing.assert_allclose(gradients[0] * factor.asnumpy(), ours[0].grad.numpy(), rtol=1e-5)
    assert not overflow
    for bad in (np.nan, np.inf):
        gradients[1][1] = bad
        assert Norm(max_norm)(tuple(map(ms.Tensor, gradients)), ms.Tensor([8.0], ms.float32))[2]


@pytest.fixture(scope="module")
def fused(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel-step")
    source = make_source(folder / "gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    return make_run(source, corpus, folder / "run", layer_spec="fused", accumulation=2)


def trained(run: Path, out: Path, steps: int = 8, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a copy; its metrics."""
    shutil.copytree(run, out)
    content = yaml.safe_load((out / "run.yaml").read_text())
    for section, values in changes.items():
        content[section].update(values)
    (out / "run.yaml").write_text(yaml.safe_dump(content))
    engine.train(RunDirectory.open(out), engine.Options(steps=steps))
    effective = yaml.safe_load((out / "logs/effective.yaml").read_text())
    wanted = "KernelTrainOneStepCell" if compat.KERNEL_WRAPPERS else "PortableTrainOneStepCell"
    assert effective["runner_wrapper"]["type"] == wanted
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"runner_config": {"gradient_accumulation_steps": 1}},
        {"optimizer": {"type": "AdamWDecayAll"}},
    ],
    ids=["accumulated", "one", "decay all"],
)
def test_a_run_is_that_of_the_general_step(
    fused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    mine = trained(fused, tmp_path / "kernel", **changes)
    monkeypatch.setattr(compat, "KERNEL_WRAPPERS", {})
    theirs = trained(fused, tmp_path / "general", **changes)
    for a, b in zip(mine, theirs, strict=True):
        for key in ("loss", "grad_norm", "lr", "loss_scale"):
            assert a[key] == pytest.approx(b[key], rel=2e-5) or a["overflow"]
        assert (a["overflow"], a["skipped_steps"]) == (b["overflow"], b["skipped_steps"])
    one, other = (tmp_path / name / "checkpoints/step-00000008" for name in ("kernel", "general"))
    for file in ("optimizer.safetensors", "model/model.safetensors"):
        a, b = load_file(one / file), load_file(other / file)
        assert set(a) == set(b), "checkpoints have the same names"
        # A key's bias has no effect, so its gradient is rounding alone, which Adam makes steps of.
        for name in (name for name in a if not name.endswith("linear_qkv.bias")):
            np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_overflows_are_skipped_until_the_scale_fits(fused: Path, tmp_path: Path, accumulation: int) -> None:
    """1e38 is too much; a sixteenth of the exponent less each time is not in the end. Weights stay until then."""
    scale = {
        "type": "DynamicLossScaleUpdateCell",
        "loss_scale_value": 1e38,
        "scale_factor": 65536.0,
        "scale_window": 100,
    }
    lines = trained(
        fused,
        tmp_path / "run",
        runner_config={"gradient_accumulation_steps": accumulation},
        runner_wrapper={"scale_sense": scale},
    )
    skipped = [line["overflow"] for line in lines]
    count = sum(skipped)
    assert 0 < count < len(lines)
    assert skipped == [True] * count + [False] * (len(lines) - count)
    scales = [line["loss_scale"] for line in lines]
    np.testing.assert_allclose(scales, [1e38 / 65536 ** min(k, count) for k in range(len(lines))], rtol=1e-5)
    # The schedule counts updates, not steps.
    assert len({line["lr"] for line in lines[: count + 1]}) == 1
    assert all(np.isfinite(line["grad_norm"]) for line in lines[count:])
