"""TensorBoard events beside metrics.jsonl, read with tensorboardX's protobuf classes; a training killed and resumed."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mindferry.checking.curves import read_curve
from mindferry.checking.event_log import EventLog
from tests.support import run_cli

# In a process of its own: tensorboardX loads a protobuf runtime that MindSpore's data sets cannot share.
READER = """
import glob, json, struct, sys
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event

def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

paths = glob.glob(sys.argv[1] + "/events.out.tfevents.*")
assert len(paths) == 1, paths
data, at, events = open(paths[0], "rb").read(), 0, []
while at < len(data):
    (size,) = struct.unpack_from("<Q", data, at)
    body = data[at + 12 : at + 12 + size]
    assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at : at + 8])
    assert struct.unpack_from("<I", data, at + 12 + size)[0] == masked(body)
    events.append(Event.FromString(body))
    at += 16 + size
assert events[0].file_version == "brain.Event:2"
assert events[1].session_log.status == 1
rows = [[e.step, e.wall_time, {v.tag: repr(v.simple_value) for v in e.summary.value}] for e in events[2:]]
print(json.dumps(rows))
"""

needs_tensorboard_x = pytest.mark.skipif(
    importlib.util.find_spec("tensorboardX") is None, reason="tensorboardX is not installed"
)


def read_back(root: Path) -> list[tuple[int, float, dict[str, float]]]:
    """(step, wall time, tag -> value) of the one event file in `root`, in file order."""
    done = subprocess.run(
        [sys.executable, "-c", READER, root], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [
        (step, wall, {k: float(v) for k, v in values.items()})
        for step, wall, values in json.loads(done.stdout)
    ]


def check_against_metrics(root: Path) -> None:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    rows = read_back(root)
    assert [row[0] for row in rows] == [line["step"] for line in lines]
    for line, (_, _, values) in zip(lines, rows, strict=True):
        named = {
            "lr" if k == "train/learning_rate" else k.removeprefix("train/"): v for k, v in values.items()
        }
        assert set(named) == set(line) - {"step"}
        for key, value in named.items():
            expected = np.float32(float(line[key]))
            assert value == expected or (math.isnan(value) and np.isnan(expected)), key
    walls = [row[1] for row in rows]
    assert walls == sorted(walls)
    assert abs(walls[-1] - time.time()) < 600


@needs_tensorboard_x
def test_a_training_killed_and_resumed(run):
    yaml = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(yaml.replace("save_checkpoint_steps: 60", "save_checkpoint_steps: 4"))
    arguments = [sys.executable, "-m", "mindferry", "train", str(run)]
    running = subprocess.Popen(
        [*arguments, "--steps", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 240
        while (
            not (run / "checkpoints/step-00000004/manifest.json").exists()
            or len((run / "metrics.jsonl").read_text().splitlines()) < 6
        ):
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    # Killed between metrics and event at the worst: then the last step is not in the events yet.
    steps = [row[0] for row in read_back(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 5
    done = run_cli("train", run, "--resume", "--steps", str(len(steps) + 3))
    assert done.returncode == 0, done.stderr
    check_against_metrics(run)


def record(step, loss):
    return {
        "step": step,
        "loss": loss,
        "lr": 1e-3,
        "overflow": False,
        "step_time": 0.5,
        "peak_memory_bytes": 1 << 33,
    }


@needs_tensorboard_x
def test_numbers_that_are_none_and_broken_lines(tmp_path):
    lines = [record(1, 3.0), record(2, "nan"), record(3, "inf"), record(4, 1e300)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo'
    )
    log = EventLog(tmp_path)
    log.feed(record(5, None))
    losses = [values.get("train/loss") for _, _, values in read_back(tmp_path)]
    assert losses[0] == 3.0
    assert math.isnan(losses[1])
    assert losses[2:] == [math.inf, math.inf, None]


def test_started_over(tmp_path):
    log = EventLog(tmp_path)
    for step in range(1, 5):
        log.feed(record(step, 2.0))
    (tmp_path / "events.out.tfevents.1.elsewhere").write_bytes(b"")
    EventLog(tmp_path).feed(record(1, 7.0))
    (ours,) = tmp_path.glob("events.out.tfevents.*.mindferry")
    assert read_curve(ours)["loss"].tolist() == [7.0]
    # Somebody else's events stay.
    assert (tmp_path / "events.out.tfevents.1.elsewhere").exists()


def test_the_curve_of_the_events_is_that_of_the_metrics(tmp_path):
    log = EventLog(tmp_path)
    for step in range(1, 4):
        log.feed(record(step, 3.0 / step))
    (path,) = tmp_path.glob("events.out.tfevents.*")
    found = read_curve(path)
    np.testing.assert_allclose(found["loss"], 3.0 / np.arange(1, 4), rtol=1e-6)
    np.testing.assert_allclose(found["lr"], 1e-3, rtol=1e-6)
    assert found["step_time"].tolist() == [0.5, 0.5, 0.5]
