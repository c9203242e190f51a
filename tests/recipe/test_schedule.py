"""Learning rates: each step of each schedule against the source's own code, to 1e-9."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindferry.errors import UsageError
from mindferry.recipes.schedule import landmarks, rate, scaled, table
from mindferry.spec import Schedule, spec_from
from mindferry.targets import run_yaml

PEAK, WARMUP, TOTAL = 6e-4, 7, 60


def transformers_rates(name: str, steps: int = TOTAL, warmup: int = WARMUP, **extra: float) -> np.ndarray:
    """The rates that transformers' scheduler gives a torch optimizer, step by step."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=extra or None)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return np.array(rates)


FROM_TRANSFORMERS = [
    ("constant", {}, {"kind": "constant", "warmup_steps": 0}),
    ("constant_with_warmup", {}, {"kind": "constant"}),
    ("linear", {}, {"kind": "linear"}),
    ("cosine", {}, {"kind": "cosine"}),
    ("cosine", {"num_cycles": 1.5}, {"kind": "cosine", "num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}, {"kind": "cosine_with_restarts", "num_cycles": 3.0}),
    ("cosine_with_min_lr", {"min_lr": 6e-5}, {"kind": "cosine", "min_learning_rate": 6e-5}),
    ("polynomial", {}, {"kind": "polynomial", "min_learning_rate": 1e-7}),
    ("polynomial", {"power": 2.0}, {"kind": "polynomial", "min_learning_rate": 1e-7, "power": 2.0}),
    ("inverse_sqrt", {}, {"kind": "inverse_sqrt"}),
    *(
        (
            "warmup_stable_decay",
            {"num_decay_steps": 20, "warmup_type": shape, "decay_type": shape, "min_lr_ratio": 0.1},
            {
                "kind": "wsd",
                "wsd_decay_steps": 20,
                "warmup_shape": shape,
                "wsd_shape": shape,
                "min_learning_rate": 0.1 * PEAK,
                "warmup_init": 0.1 * PEAK,
            },
        )
        for shape in ("linear", "cosine", "1-sqrt")
    ),
]


@pytest.mark.parametrize(("name", "extra", "ours"), FROM_TRANSFORMERS)
def test_transformers(name: str, extra: dict, ours: dict) -> None:
    schedule = Schedule(**{"learning_rate": PEAK, "warmup_steps": WARMUP, "total_steps": TOTAL, **ours})
    expected = transformers_rates(name, **extra)
    np.testing.assert_allclose(table(schedule), expected, rtol=1e-9, atol=0)


def nanogpt_get_lr(it: int, warmup: int, decay: int, low: float, old: bool) -> float:
    """What nanoGPT's train.py computes: before December 2024, and since."""
    if it < warmup:
        return PEAK * it / warmup if old else PEAK * (it + 1) / (warmup + 1)
    if it > decay:
        return low
    ratio = (it - warmup) / (decay - warmup)
    return low + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (PEAK - low)


@pytest.mark.parametrize(("rule", "old"), [("t/w", True), ("(t+1)/(w+1)", False)])
def test_nanogpt(rule: str, old: bool) -> None:
    schedule = Schedule(
        learning_rate=PEAK,
        min_learning_rate=6e-5,
        warmup_steps=WARMUP,
        warmup_rule=rule,
        total_steps=TOTAL,
        decay_steps=50,
    )
    expected = [nanogpt_get_lr(it, WARMUP, 50, 6e-5, old) for it in range(TOTAL)]
    np.testing.assert_allclose(table(schedule), expected, rtol=1e-9, atol=0)


def test_reported_first_steps() -> None:
    """The figures of the public reports: nanoGPT 443 old and new, gpt-neox 1373 fixed."""
    old = Schedule(learning_rate=6e-4, warmup_steps=2000, total_steps=600000)
    new = old.model_copy(update={"warmup_rule": "(t+1)/(w+1)"})
    assert [rate(old, s) for s in (0, 1, 2000)] == pytest.approx([0.0, 3e-7, 6e-4], rel=1e-12)
    assert [rate(new, s) for s in (0, 1, 2000)] == pytest.approx([2.998501e-7, 5.997001e-7, 6e-4], rel=1e-6)
    neox = Schedule(learning_rate=1e-3, warmup_steps=1000, total_steps=10000, warmup_rule="max(1,t)/w")
    assert [rate(neox, s) for s in (0, 1, 2)] == pytest.approx([1e-6, 1e-6, 2e-6], rel=1e-12)


def megatron_lr(
    step: int, style: str, *, low: float, init: float, warmup: int, decay: int, wsd: int, wsd_style
):
    """Megatron-LM's OptimizerParamScheduler.get_lr in iterations, from its documented behaviour."""
    if warmup > 0 and step <= warmup:
        return init + (PEAK - init) * step / warmup
    if style == "constant":
        return PEAK
    if step > decay:
        return low
    if style == "inverse-square-root":
        return max(low, PEAK * max(warmup, 1) ** 0.5 / max(step, 1) ** 0.5)
    ratio = (step - warmup) / (decay - warmup)
    coefficient = 1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    if style == "WSD":
        start = decay - wsd
        coefficient = 1.0
        if step > start:
            r = (step - start) / wsd
            coefficient = {
                "linear": 1.0 - r,
                "cosine": 0.5 * (math.cos(math.pi * r) + 1.0),
                "exponential": 2.0 * 0.5**r - 1.0,
                "minus_sqrt": 1.0 - math.sqrt(r),
            }[wsd_style]
    return low + coefficient * (PEAK - low)


@pytest.mark.parametrize(
    ("style", "wsd_style"),
    [
        *((style, "linear") for style in ("constant", "linear", "cosine", "inverse-square-root")),
        *(("WSD", shape) for shape in ("linear", "cosine", "exponential", "minus_sqrt")),
    ],
)
@pytest.mark.parametrize("warmup", [0, 7])
def test_megatron(style: str, wsd_style: str, warmup: int) -> None:
    from mindferry.recipes.megatron import schedule_of

    decay = TOTAL if style == "inverse-square-root" else 50
    arguments = {
        "lr": PEAK,
        "min_lr": 1e-5,
        "lr_warmup_init": 1e-6,
        "lr_warmup_iters": warmup,
        "train_iters": TOTAL,
        "lr_decay_iters": decay,
        "lr_decay_style": style,
        "lr_wsd_decay_iters": 15,
        "lr_wsd_decay_style": wsd_style,
    }
    schedule = schedule_of(arguments, "test")
    expected = [
        megatron_lr(s, style, low=1e-5, init=1e-6, warmup=warmup, decay=decay, wsd=15, wsd_style=wsd_style)
        for s in range(TOTAL)
    ]
    np.testing.assert_allclose(table(schedule), expected, rtol=1e-9, atol=0)


@given(
    kind=st.sampled_from(
        ["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "wsd", "cosine_with_restarts"]
    ),
    warmup=st.integers(0, 30),
    total=st.integers(31, 200),
    low=st.floats(0, 1e-4),
    rule=st.sampled_from(["t/w", "(t+1)/(w+1)", "max(1,t)/w"]),
    power=st.sampled_from([1.0, 2.0]),
)
def test_through_run_yaml_and_back(kind, warmup, total, low, rule, power) -> None:
    """What run.yaml says means the schedule that it was written for, and rates stay within their bounds."""
    schedule = Schedule(
        kind=kind,
        learning_rate=1e-3,
        min_learning_rate=low,
        warmup_steps=warmup,
        warmup_rule=rule,
        total_steps=total,
        power=power,
        wsd_decay_steps=total - warmup if kind == "wsd" else None,
    )
    back = run_yaml.schedule_from(run_yaml.lr_schedule_block(schedule))
    rates = table(schedule)
    np.testing.assert_array_equal(table(back), rates)
    assert rates.min() >= 0.0
    assert rates.max() <= 1e-3 * (1 + 1e-12)


def test_mindformers_looks_the_table_up() -> None:
    """On the device: the float64 table rounded once, for a rate no class of mindformers has."""
    import mindspore as ms

    from mindferry.training.schedule import TabledLR

    schedule = Schedule(
        learning_rate=PEAK, min_learning_rate=6e-5, warmup_steps=3, total_steps=20, warmup_rule="(t+1)/(w+1)"
    )
    block = run_yaml.lr_schedule_block(schedule)
    assert block.pop("type") == "TabledLR"
    looked_up = TabledLR(**block)
    for step in range(20):
        found = looked_up(ms.Tensor([step], ms.int32)).asnumpy()
        assert found.shape == (1,)
        assert found[0] == np.float32(rate(schedule, step))


def test_landmarks_are_what_people_compare() -> None:
    shown = landmarks(Schedule(learning_rate=1.0, warmup_steps=10, total_steps=100, kind="linear"))
    assert list(shown) == ["0", "1", "2", "3", "4", "9", "10", "11", "99"]
    assert shown["10"] == 1.0


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_scaling(rule: str, factor: float) -> None:
    schedule = Schedule(learning_rate=1e-3, min_learning_rate=1e-4, total_steps=10)
    np.testing.assert_allclose(table(scaled(schedule, rule, 4.0)), factor * table(schedule), rtol=1e-12)


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"min_learning_rate 0\.1 is above"):
        spec_from(Schedule, {"learning_rate": 0.01, "min_learning_rate": 0.1, "total_steps": 5}, "x")
    with pytest.raises(UsageError, match="needs wsd_decay_steps"):
        spec_from(Schedule, {"kind": "wsd", "learning_rate": 0.01, "total_steps": 5}, "x")
    with pytest.raises(UsageError, match="--lr-scaling: found 'cube'"):
        scaled(Schedule(learning_rate=0.1, total_steps=5), "cube", 2.0)
