"""A tiny model trained for some steps in a process of its own, before anyone blames their own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from mindferry.findings import Finding

STEPS = 12
LIMIT_SECONDS = 240
_MARK = "MINDFERRY-SMOKE "


@dataclass
class Smoke:
    """What the smoke training came to.

    Attributes:
        stages: those that ended well, with their seconds.
        losses: of mindformers' Trainer, step by step.
    """

    stages: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    code: int = 0
    output: list[str] = field(default_factory=list)
    seconds: float = 0.0


def _plain_mindspore() -> None:
    """Two dense layers, graph mode, MindSpore alone: the loss must fall."""
    import mindspore as ms
    import numpy as np
    from mindspore import nn

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8)).astype(np.float32)
    y = (x @ rng.standard_normal((8, 4)).astype(np.float32)).argmax(-1).astype(np.int32)
    net = nn.SequentialCell(nn.Dense(8, 16), nn.GELU(), nn.Dense(16, 4))
    step = nn.TrainOneStepCell(
        nn.WithLossCell(net, nn.CrossEntropyLoss()), nn.AdamWeightDecay(net.trainable_params(), 0.01)
    )
    losses = [float(step(ms.Tensor(x), ms.Tensor(y)).asnumpy()) for _ in range(20)]
    if not losses[-1] < 0.9 * losses[0]:
        raise RuntimeError(f"loss went from {losses[0]:.4f} to {losses[-1]:.4f} in 20 steps")


def _mindformers_trainer() -> list[float]:
    """GPT-2 of two layers through mindformers' own Trainer."""
    from mindferry.diagnosis.tiny import make_run
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    root = make_run(Path(tempfile.mkdtemp(dir=os.environ.get("MINDFERRY_SMOKE_DIR"))) / "run", steps=STEPS)
    outcome = engine.train(RunDirectory.open(root), engine.Options())
    return list(outcome.losses.values())


def main() -> None:
    """Entry point of the child process: one line of JSON a stage."""
    for name, body in (("MindSpore alone", _plain_mindspore), ("mindformers Trainer", _mindformers_trainer)):
        start = time.perf_counter()
        losses = body()
        said = {"stage": name, "seconds": time.perf_counter() - start, "losses": losses or []}
        sys.stdout.write(f"\n{_MARK}{json.dumps(said)}\n")
        sys.stdout.flush()


def run() -> Smoke:
    """Train in a child process; its output is kept for the start-up doctor."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mindferry-smoke-") as folder:
        env = {**os.environ, "MINDFERRY_SMOKE_DIR": folder}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "mindferry.diagnosis.environment.smoke"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_SECONDS,
                cwd=folder,
                env=env,
            )
            text, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as err:
            text, code = err.stdout or b"", -99
    smoke = Smoke(code=code, seconds=time.perf_counter() - start)
    for line in text.decode("utf-8", "replace").splitlines():
        if line.startswith(_MARK):
            said = json.loads(line.removeprefix(_MARK))
            smoke.stages[said["stage"]] = said["seconds"]
            smoke.losses = said["losses"] or smoke.losses
        else:
            smoke.output.append(line)
    return smoke


def judge(smoke: Smoke) -> list[Finding]:
    """Findings about a smoke training; the start-up doctor names what it can."""
    from mindferry.diagnosis.startup import diagnose

    if smoke.code == -99:
        return [
            Finding(
                "env.smoke",
                "problem",
                f"the smoke training did not end in {LIMIT_SECONDS} s (done: {', '.join(smoke.stages) or 'nothing'})",
                remedy="something hangs: run it by hand, python -m mindferry.diagnosis.environment.smoke",
            )
        ]
    if smoke.code != 0:
        stage = "mindformers' Trainer" if "MindSpore alone" in smoke.stages else "MindSpore alone"
        known = diagnose(smoke.output)[0]
        return [
            Finding(
                "env.smoke",
                "problem",
                f"{stage} failed: {known.message}",
                known.cause,
                known.remedy,
                known.evidence,
            )
        ]
    if not smoke.losses or not smoke.losses[-1] < smoke.losses[0]:
        shown = f"{smoke.losses[0]:.4f} to {smoke.losses[-1]:.4f}" if smoke.losses else "none"
        return [
            Finding(
                "env.smoke",
                "problem",
                f"the tiny model's loss did not fall (from {shown})",
                cause="the installation computes, and computes something wrong",
                remedy="reinstall mindspore; report this with `mindferry doctor env --json`",
            )
        ]
    return []


if __name__ == "__main__":
    main()
