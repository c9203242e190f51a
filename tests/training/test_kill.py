"""kill -9 at random moments: the newest complete checkpoint is whole, and the losses are those of an unbroken run."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mindferry.targets.run_directory import RunDirectory
from mindferry.training import checkpoints
from mindferry.training.engine import Options, train

from ..support import make_run, make_source

# Saves step after step; every tensor of step n is filled with n.
SAVER = """
import sys, pathlib
import numpy as np
from mindferry.training.checkpoints import newest, save
root = pathlib.Path(sys.argv[1])
found, _ = newest(root)
step = found.step if found else 0
print("ready", flush=True)
while True:
    step += 1
    tensors = {f"t{i}": np.full((256, 1024), step, np.float32) for i in range(4)}
    save(root, step, tensors, {"adam_m.t0": np.full(1000, step, np.float32)}, {"step": step}, keep=2)
"""


def test_a_save_is_killed_at_twenty_moments(tmp_path: Path) -> None:
    """Whatever the moment, what `newest` gives is complete and of one step, and steps never go back."""
    from safetensors.numpy import load_file

    rng = random.Random(20)
    root = tmp_path / "checkpoints"
    before = 0
    torn = 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(root)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.0, 0.15))
        process.kill()
        process.communicate()
        torn += bool(list(root.glob(".step-*.partial-*")))
        found, skipped = checkpoints.newest(root)
        assert not skipped, "a name without a dot is a complete checkpoint"
        if found is None:
            assert before == 0
            continue
        assert found.step >= before
        before = found.step
        model = load_file(found.model / "model.safetensors")
        values = {
            float(v) for tensor in (*model.values(), *found.optimizer().values()) for v in np.unique(tensor)
        }
        assert values == {float(found.step)}
        assert found.state == {"step": found.step}
    assert before > 5
    assert torn >= 3, "some kills must have hit a save"
    checkpoints.clean_partial(root)
    assert not list(root.glob(".*"))


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_training_is_killed_at_twenty_moments(corpus: Path, tmp_path: Path) -> None:
    """Dropout on, shuffled data, a checkpoint every step: the losses of every step are bit-equal, and a kill
    costs no step that metrics.jsonl had shown but the last."""
    steps = 400
    source = make_source(tmp_path / "gpt2", n_layer=1)
    whole, broken = (make_run(source, corpus, tmp_path / name, steps=steps) for name in ("whole", "broken"))
    yaml = (broken / "run.yaml").read_text()
    (broken / "run.yaml").write_text(
        yaml.replace(f"save_checkpoint_steps: {steps}", "save_checkpoint_steps: 1")
    )
    train(RunDirectory.open(whole), Options())
    rng = random.Random(9)
    killed = 0
    done = 0
    while killed < 20:
        arguments = ["--resume"] if done else []
        process = subprocess.Popen(
            [sys.executable, "-m", "mindferry", "train", str(broken), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_a_step(broken, process, done)
        time.sleep(rng.uniform(0.0, 1.0))
        process.kill()
        process.communicate()
        killed += 1
        found, skipped = checkpoints.newest(broken / "checkpoints")
        shown = (broken / "metrics.jsonl").read_text().count("\n")
        assert not skipped
        assert found is not None or shown <= 1
        done = found.step if found else 0
        assert done >= shown - 1
    assert done < steps, "the schedule must outlast the kills"
    train(RunDirectory.open(broken), Options(resume=bool(done)))
    assert len(losses(whole)) == steps
    assert losses(broken) == losses(whole)


def wait_for_a_step(run: Path, process: subprocess.Popen[str], done: int) -> None:
    """Wait until a step after `done` stands in metrics.jsonl."""
    deadline = time.monotonic() + 180
    path = run / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_text(encoding="utf-8").count("\n") > done:
            return
        time.sleep(0.02)
    pytest.fail(f"no step after {done}: {process.communicate()[1]}")
