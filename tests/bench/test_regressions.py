"""Faults planted in real trainings: each shows in its own dimension, and none shows where nothing was planted."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from mindferry.checking import bench, convergence, speed
from mindferry.checking.curves import read_curve
from mindferry.demo.source import write_corpus
from mindferry.report import collect
from mindferry.report.collect import warm_step_times
from mindferry.targets.run_directory import RunDirectory
from tests.support import make_run, make_source

STEPS = 24


@pytest.fixture(scope="module")
def train(tiny, tmp_path_factory):
    """Trains a copy of the tiny run with overrides; returns its curve."""
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


def test_sleep_in_a_step_is_slower_and_nothing_else(train, base):
    slept = train("slept", on_batch=lambda step, batch: time.sleep(0.6))
    found = speed.judge(warm_step_times(base), warm_step_times(slept), interleaved=False)
    assert found.verdict == "slower"
    assert convergence.compare(base, slept).verdict == "same"


def test_doubled_learning_rate_parts_the_curves(train, base):
    doubled = train("doubled", {"lr_schedule.learning_rate": 2e-3})
    found = convergence.compare(base, doubled)
    assert found.lr_max_rel_diff == pytest.approx(1.0, rel=1e-3)
    assert found.verdict != "same"


@pytest.fixture
def slow_loader(monkeypatch):
    """Every batch of a data pipeline takes 0.6 s more to make; returns what to call as a step begins.

    Batches are made at most two ahead: while the first step compiles, a pipeline else makes all of so short a training.
    """
    from mindspore.dataset.engine.datasets import Dataset

    batch, made, begun = Dataset.batch, [], []

    def slowly(values):
        made.append(1)
        deadline = time.monotonic() + 60
        while len(made) > len(begun) + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.6)
        return values

    def batched(self, *args, **kwargs):
        whole = batch(self, *args, **kwargs)
        return whole.map(operations=[slowly], input_columns=["input_ids"], num_parallel_workers=1)

    monkeypatch.setattr(Dataset, "batch", batched)
    return lambda step, values: begun.append(step)


def test_sleep_in_the_loader_is_time_that_waits_for_data(train, base, slow_loader):
    """bench's and the report's dimension: step time, and in it the wait for data; nothing else."""
    slept = train("loader", on_batch=slow_loader)
    assert slept["loss"].tolist() == base["loss"].tolist()
    pair = collect.dimensions(subject("base", base), subject("loader", slept))
    assert pair.speed.verdict == "slower"
    assert pair.starves
    assert pair.waiting_after - pair.waiting_before > 0.3
    assert pair.convergence.verdict == "same"
    assert not collect.dimensions(subject("loader", slept), subject("base", base)).starves


def subject(label, curve):
    return collect.Subject(label, Path(label), curve)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A run whose activations are most of its memory: 6 layers, 192 sequences of 64 tokens."""
    root = tmp_path_factory.mktemp("wide")
    make_source(root / "src", n_layer=6, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    write_corpus(root / "corpus")
    return RunDirectory(make_run(root / "src", root / "corpus", root / "run", seq_length=64, batch_size=192))


@pytest.mark.long
def test_recompute_off_is_more_memory_and_nothing_else(wide, tmp_path):
    """As bench measures it, in processes of their own: a peak is that of a process since it began.

    On fused layers: in MindSpore's compiled graphs on a CPU nothing keeps recomputed operators from running at once,
    and recompute saves no memory there.
    """
    fused = {"model.model_config.layer_spec": "fused"}
    on = {**fused, "recompute_config.recompute": True}
    off = {**fused, "recompute_config.recompute": False}
    tasks = {
        name: bench.run_task(wide, 8, tmp_path / "log", keys) for name, keys in (("run", off), ("before", on))
    }
    sides = bench.measure(tasks, 8, tmp_path, parts=False)
    assert [side.failure for side in sides.values()] == ["", ""]
    (row,) = bench.ratios(sides, "run")
    assert row["memory_verdict"] == "more", {n: s.peak_memory_bytes for n, s in sides.items()}
    assert row["verdict"] != "slower"
    np.testing.assert_allclose(sides["run"].losses, sides["before"].losses, rtol=1e-5)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_twenty_real_comparisons_of_the_same_run(tiny, tmp_path):
    """A/A: one run on both sides, 20 stretches of 12 rounds, each judged as bench would; at most one false alarm."""
    tasks = {
        name: bench.run_task(RunDirectory(tiny / "run"), 240, tmp_path / "log") for name in ("run", "again")
    }
    sides = bench.measure(tasks, 240, tmp_path, parts=False)
    alarms = []
    for part in range(20):
        cut = slice(12 * part, 12 * part + 12)
        pair = {name: bench.Side(name, {"step": side.series["step"][cut]}, peak_memory_bytes=side.peak_memory_bytes)
                for name, side in sides.items()}  # fmt: skip
        (row,) = bench.ratios(pair, "run")
        alarms += [row] if row["verdict"] != "same" or row["memory_verdict"] != "same" else []
    assert len(alarms) <= 1, alarms
    np.testing.assert_array_equal(sides["run"].losses, sides["again"].losses)


@pytest.mark.long
def test_swapped_gelu_shows_in_the_first_loss_but_not_in_the_curve_standard(train, base):
    """The curve cannot tell the two GELUs apart by mindformers' standard; that is what verify is for."""
    swapped = train("swapped", {"model.model_config.activation": "gelu_erf"})
    found = convergence.compare(base, swapped)
    assert found.verdict == "same"
    assert 1e-7 < abs(base["loss"][0] - swapped["loss"][0]) < 0.005
