"""Curves from files that the real programs write, and verdicts on curves of known difference."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.checking import convergence, events, memory, speed
from mindferry.checking.curves import Curve, read_curve
from mindferry.errors import UsageError
from tests.report.runs import losses, write_run

NANOGPT = """\
number of parameters: 10.65M
step 0: train loss 4.2874, val loss 4.2823
iter 0: loss 4.2654, time 31204.99ms, mfu -100.00%
iter 10: loss 3.2431, time 26.16ms, mfu 14.24%
"""
MEGATRON = """\
 [2024-05-01 10:00:00] iteration        1/     500 | consumed samples:            8 | elapsed time per iteration \
(ms): 1520.3 | learning rate: 1.500000E-06 | global batch size:     8 | lm loss: 1.083261E+01 | loss scale: 1.0 | \
grad norm: 21.130 | number of skipped iterations:   0 | number of nan iterations:   0 |
 [2024-05-01 10:00:01] iteration        2/     500 | consumed samples:           16 | elapsed time per iteration \
(ms): 220.5 | learning rate: 3.000000E-06 | global batch size:     8 | lm loss: NAN | loss scale: 1.0 | \
grad norm: 20.001 |
"""


def curve(values, label="x", **columns) -> Curve:
    steps = np.arange(1, len(values) + 1)
    return Curve(label, "test", steps, {"loss": np.asarray(values, float), **columns})


def test_nanogpt_and_megatron_logs(tmp_path):
    (tmp_path / "nano.log").write_text(NANOGPT)
    nano = read_curve(tmp_path / "nano.log")
    assert (nano.format, nano.averaged) == ("nanoGPT stdout", False)
    # Its iter 0 is the loss of the first update.
    assert nano.steps.tolist() == [1, 11]
    assert nano["loss"].tolist() == [4.2654, 3.2431]
    assert nano["step_time"][1] == pytest.approx(0.02616)
    (tmp_path / "megatron.log").write_text(MEGATRON)
    megatron = read_curve(tmp_path / "megatron.log")
    assert (megatron.format, megatron.averaged) == ("Megatron-LM log", True)
    assert megatron.steps.tolist() == [1, 2]
    assert megatron["loss"][0] == 10.83261
    assert np.isnan(megatron["loss"][1])
    assert "1 of 2 steps have no finite loss" in megatron.notes
    assert megatron["lr"].tolist() == [1.5e-6, 3e-6]
    assert megatron["grad_norm"].tolist() == [21.13, 20.001]


def test_the_state_that_transformers_writes(tmp_path):
    from transformers import TrainerState

    logs = [{"loss": 3.5, "grad_norm": 1.25, "learning_rate": 1e-4, "epoch": 0.1, "step": 10},
            {"eval_loss": 3.4, "epoch": 0.1, "step": 10},
            {"loss": 3.0, "grad_norm": 1.0, "learning_rate": 5e-5, "epoch": 0.2, "step": 20},
            {"train_runtime": 3.0, "train_loss": 3.2, "step": 20}]  # fmt: skip
    TrainerState(log_history=logs, global_step=20).save_to_json(str(tmp_path / "trainer_state.json"))
    found = read_curve(tmp_path)
    assert found.averaged
    assert found.steps.tolist() == [10, 20]
    assert found["loss"].tolist() == [3.5, 3.0]
    assert found["lr"].tolist() == [1e-4, 5e-5]


# In a process of its own: tensorboardX loads a protobuf runtime that MindSpore's data sets cannot share.
TENSORBOARD_X = """
import sys
from tensorboardX import SummaryWriter
writer = SummaryWriter(sys.argv[1])
for step in range(1, 6):
    writer.add_scalar("train/loss", 5.0 / step, step)
    writer.add_scalar("train/learning_rate", 1e-3, step)
writer.close()
"""


def test_events_of_tensorboard_x(tmp_path):
    if importlib.util.find_spec("tensorboardX") is None:
        pytest.skip("tensorboardX is not installed")
    subprocess.run([sys.executable, "-c", TENSORBOARD_X, tmp_path], check=True)
    found = read_curve(tmp_path)
    assert found.format == "TensorBoard events"
    np.testing.assert_allclose(found["loss"], 5.0 / np.arange(1, 6), rtol=1e-6)
    np.testing.assert_allclose(found["lr"], 1e-3, rtol=1e-6)


def test_events_round_trip_damage_and_crc(tmp_path):
    # CRC-32C of "123456789" is 0xE3069283 (RFC 3720, B.4's polynomial); masked as TFRecord does.
    plain = 0xE3069283
    assert events.masked_crc(b"123456789") == ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
    path = tmp_path / "events.out.tfevents.1.x"
    events.write_scalars(path, [(1.0, step, {"loss": step / 2}) for step in range(1, 4)])
    assert events.read_scalars(path) == ({"loss": [(1, 0.5), (2, 1.0), (3, 1.5)]}, "")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    scalars, note = events.read_scalars(path)
    assert len(scalars["loss"]) == 2
    assert "middle of a record" in note
    path.write_bytes(whole[:20] + b"\xff" * 40)
    assert "d" in events.read_scalars(path)[1]


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_bytes_as_events_or_logs(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("any")
    for name in ("events.out.tfevents.1", "a.log", "a.json", "a.jsonl"):
        (folder / name).write_bytes(data)
        try:
            read_curve(folder / name)
        except UsageError as err:
            assert str(folder / name) in err.message  # noqa: PT017 - most bytes are readable


def test_nothing_to_read(tmp_path):
    with pytest.raises(UsageError, match=r"no metrics\.jsonl"):
        read_curve(tmp_path)
    with pytest.raises(UsageError, match="no such file"):
        read_curve(tmp_path / "absent")
    (tmp_path / "x.log").write_text("hello\n")
    with pytest.raises(UsageError, match="no training step"):
        read_curve(tmp_path / "x.log")


def test_a_mean_is_compared_with_a_mean():
    fine = curve(np.linspace(4, 2, 100))
    steps = np.arange(10, 101, 10)
    means = [fine["loss"][s - 10 : s].mean() for s in steps]
    logged = Curve("hf", "test", steps, {"loss": np.array(means)}, averaged=True)
    found = convergence.compare(logged, fine)
    assert found.verdict == "same"
    np.testing.assert_allclose(found.reference, found.candidate)
    # Taken at single steps the two would differ by half an interval.
    assert abs(fine["loss"][9] - means[0]) > 0.05


def test_twenty_comparisons_of_the_same_thing_give_at_most_one_alarm():
    falls = [losses(300, 0.01, seed) for seed in range(21)]
    verdicts = [convergence.compare(curve(falls[0]), curve(other)).verdict for other in falls[1:]]
    assert sum(verdict != "same" for verdict in verdicts) <= 1
    rng = np.random.default_rng(0)
    times = [0.1 * rng.lognormal(0, 0.1, 60) for _ in range(40)]
    pairs = list(zip(times[::2], times[1::2], strict=True))
    assert sum(speed.judge(a, b, interleaved=True).verdict != "same" for a, b in pairs) <= 1
    assert sum(speed.judge(a, b, interleaved=False).verdict != "same" for a, b in pairs) <= 1


def test_each_way_of_parting_is_named():
    base = losses(300, 0.01, 1)
    slow = base + np.where(np.arange(300) >= 120, 0.3, 0.0)
    found = convergence.compare(curve(base), curve(slow))
    assert found.verdict == "slower"
    assert 110 <= found.parted_at <= 135
    assert found.parted
    assert convergence.compare(curve(slow), curve(base)).verdict == "faster"
    later = losses(300, 0.005, 1)
    found = convergence.compare(curve(base), curve(later))
    assert found.verdict == "slower"
    shaky = base + np.where(np.arange(300) % 2, 0.4, -0.4)
    assert convergence.compare(curve(base), curve(shaky)).verdict == "oscillating"
    broken = base.copy()
    broken[200:] = np.nan
    found = convergence.compare(curve(base), curve(broken))
    assert (found.verdict, found.parted_at) == ("diverged", 201)
    assert convergence.compare(curve(base[:5]), curve(base[:5])).verdict == "undecided"
    assert convergence.compare(curve(base), curve(base)).verdict == "same"


def test_learning_rates_are_compared_too():
    lr = np.linspace(1e-3, 0, 50)
    a, b = curve(np.ones(50), lr=lr), curve(np.ones(50), lr=2 * lr)
    assert convergence.compare(a, b).lr_max_rel_diff == pytest.approx(1.0)


def test_mindformers_thresholds():
    base = np.full(20, 2.0)
    norms = np.full(20, 1.0)

    def passed(other, other_norms):
        rows = convergence.thresholds(curve(base, grad_norm=norms), curve(other, grad_norm=other_norms))
        return {row.name: row.passed for row in rows}

    assert passed(base + 0.009, norms * 1.09) == {
        "first_step_loss": True,
        "mean_loss": True,
        "global_norm": True,
    }
    # 0.011 is above 0.005 and above 0.5 % of 2.
    assert passed(base + 0.011, norms * 1.11) == {
        "first_step_loss": False,
        "mean_loss": True,
        "global_norm": False,
    }
    assert passed(base + 0.03, norms)["mean_loss"] is False
    assert convergence.thresholds(curve(base), curve(base))[2].passed is None


def test_speed_and_memory():
    rng = np.random.default_rng(1)
    a, b = 0.2 * rng.lognormal(0, 0.05, 40), 0.1 * rng.lognormal(0, 0.05, 40)
    found = speed.judge(a, b, interleaved=True)
    assert found.verdict == "faster"
    assert found.ratio == pytest.approx(2, rel=0.05)
    assert speed.judge(b, a, interleaved=False).verdict == "slower"
    assert speed.judge(a[:3], b[:3], interleaved=True).verdict == "undecided"
    assert memory.judge(1e9, 1.01e9) == "same"
    assert (memory.judge(1e9, 2e9), memory.judge(2e9, 1e9)) == ("more", "less")
    assert memory.judge(float("nan"), 1e9) == "undecided"


def test_command_compares_a_run_with_a_log(tmp_path):
    from tests.support import run_cli

    run = write_run(tmp_path / "run")
    (tmp_path / "nano.log").write_text(
        "".join(f"iter {i}: loss {v:.4f}, time 9.00ms, mfu 1%\n" for i, v in enumerate(losses(300, 0.002, 0)))
    )
    done = run_cli("report", run, tmp_path / "nano.log", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["comparisons"][0]["convergence"]["verdict"] == "same"
    assert (run / "report.html").stat().st_size == answer["bytes"] < 1_000_000
    wrong = run_cli("report", tmp_path / "nothing")
    assert wrong.returncode == 2
