"""Short trainings of a run with other settings, in a scratch directory: the run itself is only read."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.diagnosis.loss.metrics import Metrics, from_records
from mindferry.targets.run_directory import RunDirectory

STEPS = 24


@dataclass
class Scratch:
    """A directory that stands in for a run: its run.yaml, links to its data and weights, nothing else."""

    run: RunDirectory
    tick: Callable[[str], None] = lambda note: None

    def train(self, steps: int, overrides: dict[str, Any], note: str = "") -> Metrics:
        """Train the first `steps` steps with `overrides` (dotted keys); no checkpoints are written.

        Raises:
            MindferryError, RuntimeError and whatever else MindSpore raises.
        """
        from mindferry.training import engine

        records: list[dict[str, Any]] = []
        settings = {"callbacks": [{"type": "MFLossMonitor", "per_print_times": 1}], **overrides}
        engine.train(
            self.run, engine.Options(steps=steps, restart=True, overrides=settings, on_step=records.append)
        )
        self.tick(note)
        return from_records(records)


@contextmanager
def scratch_of(run: RunDirectory, tick: Callable[[str], None] = lambda note: None) -> Iterator[Scratch]:
    """A scratch directory of `run`, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mindferry-doctor-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "run"
        root.mkdir()
        (root / "run.yaml").write_bytes(run.yaml.read_bytes())
        for name in ("data", "model"):
            if (run.root / name).exists():
                (root / name).symlink_to((run.root / name).resolve())
        yield Scratch(RunDirectory.open(root), tick)
