"""The optimizer step against PyTorch: groups, AdamW, clipping, accumulation, loss scale."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mindferry.recipes.schedule import rate
from mindferry.spec import Schedule

from . import tiny

SCHEDULE = Schedule(
    kind="cosine", learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=10, total_steps=100
)


def run_mindspore(
    step: Any, batches: list[list[np.ndarray]]
) -> list[tuple[float, bool, float, float, float]]:
    """(loss, overflow, scale, rate, norm) of each step."""
    import mindspore as ms

    rows = []
    for batch in batches:
        outputs = step(*(ms.Tensor(value) for value in batch))
        rows.append(tuple(float("nan") if v is None else float(v.asnumpy().reshape(-1)[0]) for v in outputs))
    return rows


def parameters_of(step: Any) -> dict[str, np.ndarray]:
    return {p.name: p.asnumpy() for p in step.network.trainable_params()}


def run_torch(
    values: dict[str, np.ndarray],
    batches: list[list[np.ndarray]],
    schedule: Schedule = SCHEDULE,
    *,
    micro: int = 1,
    per_token: bool = False,
    clip: float = 1.0,
    weight_decay: float = 0.1,
    decay_all: bool = False,
) -> tuple[list[float], list[float], dict[str, np.ndarray]]:
    """Losses, gradient norms and final parameters of plain PyTorch."""
    import torch

    parameters = tiny.torch_parameters(values)
    decayed = [p for n, p in parameters.items() if decay_all or (p.ndim > 1 and not n.endswith("bias"))]
    plain = [p for p in parameters.values() if not any(p is other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(schedule, number)
        optimizer.zero_grad()
        size = batch[0].shape[0] // micro
        total = 0.0
        for i in range(micro):
            part = [value[i * size : (i + 1) * size] for value in batch]
            mask = torch.from_numpy(part[2].astype(np.float32))
            count = float(batch[2].sum()) if per_token else float(part[2].sum()) * micro
            loss = (tiny.torch_losses(parameters, part) * mask).sum() / count
            loss.backward()
            total += float(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), clip)))
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: p.detach().numpy() for name, p in parameters.items()}


def compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Relative to the size of each tensor, as its smallest elements are arbitrarily near 0."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = np.linalg.norm(found[name] - value) / np.linalg.norm(value)
        assert difference <= tolerance, (name, difference)


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWDecayAll"])
def test_a_hundred_steps_of_adamw(optimizer: str) -> None:
    """Groups, decoupled decay, bias correction, schedule and clipping together, fp32."""
    values, data = tiny.weights(), tiny.batches(100, 4)
    step = tiny.wrapped(
        tiny.mindspore_network(values), SCHEDULE, use_clip_grad=True, max_grad_norm=0.5, decay=optimizer
    )
    found = run_mindspore(step, data)
    losses, norms, parameters = run_torch(values, data, clip=0.5, decay_all=optimizer == "AdamWDecayAll")
    assert max(norms) > 0.5 > min(norms), "the limit must act in some steps and not in others"
    np.testing.assert_allclose([row[0] for row in found], losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose([row[4] for row in found], norms, rtol=1e-4)
    np.testing.assert_allclose([row[3] for row in found], [rate(SCHEDULE, s) for s in range(100)], rtol=1e-7)
    compare(parameters_of(step), parameters, 1e-5)


RATES = {"learning_rate": 3e-3, "total_steps": 100}
SCHEDULES = {
    "constant": Schedule(kind="constant", **RATES),
    "linear": Schedule(kind="linear", warmup_steps=7, **RATES),
    "cosine": Schedule(
        kind="cosine", min_learning_rate=3e-4, warmup_steps=10, warmup_rule="(t+1)/(w+1)", **RATES
    ),
    "inverse square root": Schedule(kind="inverse_sqrt", warmup_steps=10, timescale=10, **RATES),
    "wsd": Schedule(kind="wsd", warmup_steps=10, wsd_decay_steps=30, wsd_shape="1-sqrt", **RATES),
}
# Micro-batches, and whether the step's loss is the mean over its tokens.
AVERAGES = {"whole": (1, False), "mean of means": (4, False), "mean over tokens": (4, True)}
GRID = list(itertools.product(("AdamW", "AdamWDecayAll"), SCHEDULES, AVERAGES))
SOME = [
    ("AdamWDecayAll", "constant", "whole"),
    ("AdamW", "linear", "mean of means"),
    ("AdamWDecayAll", "inverse square root", "mean over tokens"),
    ("AdamW", "wsd", "mean over tokens"),
]


@pytest.mark.parametrize(
    ("optimizer", "kind", "average"),
    [pytest.param(*cell, marks=() if cell in SOME else pytest.mark.long) for cell in GRID],
)
def test_a_hundred_steps_of_every_recipe(optimizer: str, kind: str, average: str) -> None:
    """float32, rows of unequal numbers of tokens: losses within 1e-5, parameters after 100 steps within 1e-5."""
    micro, per_token = AVERAGES[average]
    values, data = tiny.weights(), tiny.batches(100, 8, ragged=True)
    step = tiny.wrapped(
        tiny.mindspore_network(values), SCHEDULES[kind], use_clip_grad=True, max_grad_norm=0.5, decay=optimizer,
        micro_batches=micro, per_token_loss=per_token,
    )  # fmt: skip
    found = run_mindspore(step, data)
    losses, _, parameters = run_torch(
        values, data, SCHEDULES[kind], micro=micro, per_token=per_token, clip=0.5,
        decay_all=optimizer == "AdamWDecayAll",
    )  # fmt: skip
    np.testing.assert_allclose([row[0] for row in found], losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(
        [row[3] for row in found], [rate(SCHEDULES[kind], s) for s in range(100)], rtol=1e-7
    )
    compare(parameters_of(step), parameters, 1e-5)


def test_groups_are_the_sources_name_by_name() -> None:
    """Matrices decay, biases and norms do not: mindformers, nanoGPT (two or more dimensions), transformers."""
    import torch
    from mindformers.trainer.optimizer_grouped_parameters import get_optimizer_grouped_parameters
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer

    groups = get_optimizer_grouped_parameters(tiny.mindspore_network(tiny.weights()), 0.1)
    found = {p.name: group["weight_decay"] for group in groups for p in group["params"]}
    assert found == {
        "embedding.weight": 0.1,
        "fc.weight": 0.1,
        "head.weight": 0.1,
        "fc.bias": 0.0,
        "norm.weight": 0.0,
    }
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    trainer_names = set(Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model))
    trainer_names.remove("lm_head.weight")  # tied: the same tensor as wte.weight
    by_dimension = {name for name, p in model.named_parameters() if p.dim() >= 2}
    megatron = {n for n, p in model.named_parameters() if not (n.endswith(".bias") or len(p.shape) == 1)}
    assert trainer_names == by_dimension == megatron
    assert "transformer.wte.weight" in by_dimension
    assert "transformer.wpe.weight" in by_dimension
    assert isinstance(model.transformer.ln_f, torch.nn.LayerNorm)


def test_one_step_of_pure_decay() -> None:
    """Gradient 0, rate 0.1, decay 0.1: a decayed weight of 1 becomes 0.99, the others stay."""
    values = {name: np.ones_like(value) for name, value in tiny.weights().items()}
    schedule = Schedule(kind="constant", learning_rate=0.1, total_steps=5)
    step = tiny.wrapped(tiny.mindspore_network(values, factor=0.0), schedule)
    run_mindspore(step, tiny.batches(1, 2))
    for name, value in parameters_of(step).items():
        expected = 0.99 if value.ndim > 1 else 1.0
        np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("per_token", [False, True])
def test_accumulation_is_one_big_batch(per_token: bool) -> None:
    """Micro-batches with unequal token counts, averaged as the source does it: 1e-6."""
    values, data = tiny.weights(), tiny.batches(25, 8, ragged=True)
    step = tiny.wrapped(
        tiny.mindspore_network(values),
        SCHEDULE,
        use_clip_grad=True,
        max_grad_norm=1.0,
        micro_batches=4,
        per_token_loss=per_token,
        scale_sense=1024.0,
    )
    found = run_mindspore(step, data)
    losses, norms, parameters = run_torch(values, data, micro=4, per_token=per_token)
    np.testing.assert_allclose([row[0] for row in found], losses, atol=1e-6, rtol=0)
    np.testing.assert_allclose([row[4] for row in found], norms, rtol=1e-4)
    assert [row[2] for row in found] == [1024.0] * 25
    compare(parameters_of(step), parameters, 1e-6)
    if per_token:
        whole, _, _ = run_torch(values, data)
        np.testing.assert_allclose([row[0] for row in found], whole, atol=1e-5, rtol=0)


def test_the_two_averages_differ() -> None:
    """Mean of means and mean over tokens are not the same with unequal counts: the test above can fail."""
    values, data = tiny.weights(), tiny.batches(10, 8, ragged=True)
    means, _, _ = run_torch(values, data, micro=4)
    tokens, _, _ = run_torch(values, data, micro=4, per_token=True)
    assert max(abs(a - b) for a, b in zip(means, tokens, strict=True)) > 1e-2


@pytest.mark.parametrize("micro", [1, 2])
def test_dynamic_loss_scale_is_torchs(micro: int) -> None:
    """Overflow divides, never multiplies; `window` good steps multiply; skipped updates change nothing."""
    import mindspore as ms
    import torch

    values, data = tiny.weights(), tiny.batches(20, 4)
    bad = {2, 3, 11}
    network = tiny.mindspore_network(values)
    scale_sense = {
        "type": "FlooredLossScale",
        "loss_scale_value": 1024.0,
        "scale_factor": 2.0,
        "scale_window": 4,
        "scale_floor": 256.0,
    }
    step = tiny.wrapped(network, SCHEDULE, scale_sense=scale_sense, micro_batches=micro)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    updates = 0
    for number, batch in enumerate(data):
        network.factor.set_data(ms.Tensor([np.inf if number in bad else 1.0], ms.float32))
        before = parameters_of(step)
        row = run_mindspore(step, [batch])[0]
        assert bool(row[1]) == (number in bad)
        assert row[2] == scaler.get_scale(), f"scale used by step {number}"
        assert row[3] == pytest.approx(rate(SCHEDULE, updates), rel=1e-6, abs=1e-12)
        if number in bad:
            compare(parameters_of(step), before, 0.0)
        else:
            updates += 1
        parameter.grad = torch.full_like(parameter, torch.inf if number in bad else 1.0) * scaler.get_scale()
        scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
    assert int(step.optimizer.global_step.asnumpy()[0]) == updates == 17
