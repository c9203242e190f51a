"""Faults planted in real trainings: each shows in its own dimension, and none shows where nothing was planted."""

from __future__ import annotations

import shutil
import time

import pytest

from mindferry.checking import convergence, speed
from mindferry.checking.curves import read_curve
from mindferry.report.collect import warm_step_times

STEPS = 24


@pytest.fixture(scope="module")
def train(tiny, tmp_path_factory):
    """Trains a copy of the tiny run with overrides; returns its curve."""
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    root = tmp_path_factory.mktemp("regressions")

    def run(name: str, overrides=None, on_batch=None):
        shutil.copytree(tiny / "run", root / name, ignore=shutil.ignore_patterns("logs", "bench.json"))
        keys = {"callbacks": [{"type": "MFLossMonitor", "per_print_times": 1}], **(overrides or {})}
        engine.train(
            RunDirectory(root / name), engine.Options(steps=STEPS, overrides=keys, on_batch=on_batch)
        )
        return read_curve(root / name)

    return run


@pytest.fixture(scope="module")
def base(train):
    return train("base")


def test_nothing_planted_nothing_found(train, base):
    again = train("again")
    assert convergence.compare(base, again).verdict == "same"
    assert all(row.passed for row in convergence.thresholds(base, again) if row.passed is not None)


def test_sleep_in_the_loader_is_slower_and_nothing_else(train, base):
    slept = train("slept", on_batch=lambda step, batch: time.sleep(0.6))
    found = speed.judge(warm_step_times(base), warm_step_times(slept), interleaved=False)
    assert found.verdict == "slower"
    assert convergence.compare(base, slept).verdict == "same"


def test_doubled_learning_rate_parts_the_curves(train, base):
    doubled = train("doubled", {"lr_schedule.learning_rate": 2e-3})
    found = convergence.compare(base, doubled)
    assert found.lr_max_rel_diff == pytest.approx(1.0, rel=1e-3)
    assert found.verdict != "same"


@pytest.mark.long
def test_swapped_gelu_shows_in_the_first_loss_but_not_in_the_curve_standard(train, base):
    """The curve cannot tell the two GELUs apart by mindformers' standard; that is what verify is for."""
    swapped = train("swapped", {"model.model_config.activation": "gelu_erf"})
    found = convergence.compare(base, swapped)
    assert found.verdict == "same"
    assert 1e-7 < abs(base["loss"][0] - swapped["loss"][0]) < 0.005
