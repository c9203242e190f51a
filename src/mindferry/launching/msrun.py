"""Starts msrun, watches its ranks, and ends all of them when one dies or this process does.

msrun puts each worker into a session of its own and starts whatever `python` is first on PATH, so killing its
process group reaches no worker, and a wrong PATH starts another Python. Both are taken care of here: workers ask
the kernel to end with msrun (`die_with_parent`), msrun with us.

Files in the job's folder, all written by the ranks:
  rank-R.pid           process number, written first
  rank-R.result.json   what the rank returns, or {"error": {...}}; written last
  msrun/worker_R.log   everything the rank printed
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError
from mindferry.targets.run_directory import write_json

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.05
# A rank that ends badly takes its peers along within a moment; the reason is in the first that ended.
_GRACE_SECONDS = 5.0


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _start() -> None:
    """In msrun before it starts: signals that a training blocks for itself reach it and the ranks."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with_parent()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def worker_environment(workers: int) -> dict[str, str]:
    """This environment for msrun's children: the python that runs us first on PATH, cores shared out."""
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    environment.setdefault("GLOG_v", "2")
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    # Ranks of another job that started this one must not be taken for ours.
    for name in (
        "MS_ROLE",
        "MS_NODE_ID",
        "MS_WORKER_NUM",
        "MS_SCHED_HOST",
        "MS_SCHED_PORT",
        "RANK_ID",
        "RANK_SIZE",
    ):
        environment.pop(name, None)
    return environment


@dataclass
class Job:
    """One msrun with `workers` ranks of `script`, each called as `script FOLDER`.

    Attributes:
        folder: request.json for the ranks, and what they leave (see the module).
        on_poll: called about twenty times a second while the ranks run.
        start: a command of its own that ends in msrun with `script FOLDER`; variables for it: MASTER, PORT, WORKERS,
            LOCAL_WORKERS, LOGS, RANK_FOLDER.
    """

    script: Path
    folder: Path
    workers: int
    on_poll: Callable[[], None] = lambda: None
    start: list[str] = field(default_factory=list)
    _first_dead: int | None = field(default=None, init=False)

    def run(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Start, wait, and return what each rank wrote, by rank.

        Raises:
            MindferryError: a rank failed; its own error is the message.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob("rank-*"):
            old.unlink()
        write_json(self.folder / "request.json", request)
        environment = worker_environment(self.workers)
        command = self._command(environment)
        with open(self.folder / "msrun.log", "wb") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_start,
            )  # fmt: skip
        try:
            self._wait(process)
        finally:
            self._end(process)
        return self._results(process.returncode)

    def _command(self, environment: dict[str, str]) -> list[str]:
        """What to start; adds to `environment` what it needs."""
        logs, port = self.folder / "msrun", str(free_port())
        if self.start:
            environment |= {
                "MASTER": "127.0.0.1", "PORT": port, "WORKERS": str(self.workers), "LOCAL_WORKERS": str(self.workers),
                "LOGS": str(logs), "RANK_FOLDER": str(self.folder), "PYTHON": sys.executable,
            }  # fmt: skip
            return self.start
        return [
            sys.executable, "-m", "mindspore.parallel.cluster.run",
            f"--worker_num={self.workers}", f"--local_worker_num={self.workers}",
            "--master_addr=127.0.0.1", f"--master_port={port}", f"--log_dir={logs}", "--join=True",
            "--tail_worker_log=-1", "--cluster_time_out=300", str(self.script), str(self.folder),
        ]  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = None
        while process.poll() is None:
            self.on_poll()
            if self._first_dead is None:
                self._first_dead = self._dead_rank()
                if self._first_dead is not None:
                    deadline = time.monotonic() + _GRACE_SECONDS
            elif deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        self.on_poll()

    def _pid(self, rank: int) -> int | None:
        try:
            return int((self.folder / f"rank-{rank}.pid").read_text())
        except (OSError, ValueError):
            return None

    def _dead_rank(self) -> int | None:
        """A rank that has failed: it says so, or it is gone and left no result."""
        for rank in range(self.workers):
            result = self._result(rank)
            if result is not None:
                if "error" in result:
                    return rank
                continue
            pid = self._pid(rank)
            if pid is not None and not _alive(pid) and self._result(rank) is None:
                return rank
        return None

    def _result(self, rank: int) -> dict[str, Any] | None:
        try:
            content: dict[str, Any] = json.loads(
                (self.folder / f"rank-{rank}.result.json").read_text("utf-8")
            )
        except (OSError, ValueError):
            return None
        return content

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """No process of the job outlives this."""
        for rank in range(self.workers):
            pid = self._pid(rank)
            if pid is not None and process.poll() is None:
                _kill(pid)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _results(self, returncode: int) -> list[dict[str, Any]]:
        found = [self._result(rank) for rank in range(self.workers)]
        failed = [rank for rank, item in enumerate(found) if item is None or "error" in item]
        if not failed:
            return [item for item in found if item is not None]
        first = self._first_dead if self._first_dead in failed else _earliest(found, failed)
        item = found[first]
        log = self.folder / "msrun" / f"worker_{first}.log"
        if item is not None:
            error = item["error"]
            raise MindferryError(
                f"rank {first} of {self.workers}: {error['message']}", cause=error["cause"], remedy=error["remedy"],
                id=error["id"], evidence=error["evidence"] or str(log),
            )  # fmt: skip
        raise MindferryError(
            f"rank {first} of {self.workers} ended without a word (killed, or out of memory)",
            cause=_last_line(log)
            or _last_line(self.folder / "msrun.log")
            or f"msrun ended with {returncode}",
            remedy=f"its log is {log}; the other ranks were ended with it, complete checkpoints are intact",
            id="launch.rank-died",
        )


def _earliest(found: list[dict[str, Any] | None], failed: list[int]) -> int:
    """The rank whose failure came first; one that left no result counts as last."""

    def moment(rank: int) -> float:
        item = found[rank]
        return float(item["at"]) if item else float("inf")

    return min(failed, key=moment)


def _last_line(log: Path) -> str:
    """The last line of `log` that says something, at most 300 characters."""
    try:
        with open(log, "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - 8192))
            lines = handle.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _alive(pid: int) -> bool:
    """Whether process `pid` runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
