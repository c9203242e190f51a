"""What every script that msrun starts does around its work: pid, result, error, and the scheduler's role."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError
from mindferry.launching.msrun import die_with_parent
from mindferry.targets.run_directory import write_json, write_text


def main(work: Callable[[Path, dict[str, Any], int], dict[str, Any]]) -> None:
    """Run `work(folder, request, rank)` as one rank of a launching.msrun.Job; never returns."""
    die_with_parent()
    folder = Path(sys.argv[1])
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        schedule()
        sys.exit(0)
    rank = int(os.environ.get("RANK_ID", os.environ.get("MS_NODE_ID", "0")))
    write_text(folder / f"rank-{rank}.pid", str(os.getpid()))
    result_file = folder / f"rank-{rank}.result.json"
    try:
        request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        result = work(folder, request, rank)
    except BaseException as err:
        traceback.print_exc()
        write_json(result_file, {"error": described(err), "at": time.time()})
        sys.stdout.flush()
        sys.stderr.flush()
        # Not through the interpreter's clean-up: MindSpore's would wait for the other ranks.
        os._exit(1)
    write_json(result_file, {**result, "at": time.time()})
    sys.exit(0)


def described(err: BaseException) -> dict[str, str]:
    """An exception as the fields of MindferryError, with the cause that the doctor's knowledge base names."""
    if isinstance(err, MindferryError) and err.__cause__ is None:
        return {"message": err.message, "cause": err.cause, "remedy": err.remedy, "id": err.id,
                "evidence": err.evidence}  # fmt: skip
    from mindferry.diagnosis.startup.report import explained

    if isinstance(err, MindferryError):
        return described(explained(err))
    first = next((line for line in str(err).splitlines() if line.strip()), type(err).__name__)
    wrapped = MindferryError(f"{type(err).__name__}: {first.strip()}", id="launch.failed")
    wrapped.__cause__ = err
    return described(explained(wrapped))


def schedule() -> None:
    """The process that msrun starts beside the ranks: it brings them together and waits for them."""
    import mindspore as ms
    from mindspore.communication import init

    ms.set_device("CPU")
    init()
