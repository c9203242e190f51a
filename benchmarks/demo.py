"""The run of `make demo`, for benchmarks that train one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def migrated(root: Path, steps: int, *more: str) -> Path:
    """Build the demo's source (barely trained) and corpus in `root` and migrate them; returns the run directory."""
    from mindferry.demo import source

    source.build(root / "gpt2", steps=1, on_step=lambda step, loss: None)
    source.write_corpus(root / "demo-corpus")
    run = root / "run"
    command = [
        sys.executable,
        "-m",
        "mindferry",
        "migrate",
        str(root / "gpt2"),
        "--data",
        str(root / "demo-corpus"),
    ]
    command += ["--out", str(run), "--seq-length", "128", "--batch-size", "4", "--steps", str(steps), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return run
