"""The script of one process of `mindferry train --workers N`; msrun starts it (see training.workers)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STOP = "stop"


def work(folder: Path, request: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as rank `rank`; returns what the run did, for the process that started this one."""
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import checkpoints, engine
    from mindferry.training.interruption import StopFile

    run = RunDirectory.open(Path(request["run"]))
    options = engine.Options(
        mode=request["mode"],
        device=request["device"],
        overrides=request["overrides"],
        interruption=StopFile(folder / STOP),
        workers=request["workers"],
        rank=rank,
    )
    content = engine.prepare(run, options)
    checkpoint = checkpoints.opened(Path(request["checkpoint"])) if request["checkpoint"] else None
    done = engine.fit(run, options, content, checkpoint, request["start"], request["last"])
    return {
        "first_step": done.first_step,
        "last_step": done.last_step,
        "losses": {str(step): loss for step, loss in done.losses.items()},
        "signal": done.signal,
        "checkpoint": str(done.checkpoint) if done.checkpoint else None,
        "skipped": done.skipped,
        "notes": done.notes,
        "optimizer_bytes": done.optimizer_bytes,
    }


if __name__ == "__main__":
    from mindferry.launching.rank import main

    main(work)
