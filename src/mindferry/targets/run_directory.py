"""The run directory: what lies where, and how it comes into being all at once or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError

_PARTIAL = ".partial-"


@dataclass(frozen=True)
class RunDirectory:
    """Paths inside one run."""

    root: Path

    @property
    def yaml(self) -> Path:
        return self.root / "run.yaml"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def migration(self) -> Path:
        return self.root / "migration.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @classmethod
    def open(cls, root: Path) -> RunDirectory:
        """The run at `root`.

        Raises:
            UsageError: it is no directory, or holds no run.yaml.
        """
        run = cls(root.resolve())
        if not run.root.is_dir():
            raise UsageError(f"{root}: no such directory", remedy="make a run with `mindferry migrate`")
        if not run.yaml.is_file() and (run.root / "gpt2.yaml").is_file():
            raise UsageError(
                f"{root}: a run for mindformers 1.3.2 (gpt2.yaml), which cannot be run here",
                remedy="start it with that release; here, give a run of the same source for today's mindformers",
            )
        if not run.yaml.is_file():
            raise UsageError(
                f"{root}: no run.yaml in it", remedy="give a directory made by `mindferry migrate`"
            )
        return run


def write_text(path: Path, text: str) -> None:
    """Write `path` whole: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}{_PARTIAL}{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable: a rename survives a power loss only after that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """`write_text` of indented JSON."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def check_free(out: Path, force: bool) -> None:
    """Refuse an `out` that exists and is not empty, unless `force`.

    Raises:
        UsageError: it is a file, or a directory with something in it.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out}: is a file, expected a directory to create", remedy="choose another --out")
    if any(out.iterdir()) and not force:
        raise UsageError(f"{out}: not empty", remedy="choose another --out, or replace it with --force")
    if (
        force
        and any(out.iterdir())
        and not any((out / name).is_file() for name in ("run.yaml", "migration.json"))
    ):
        raise UsageError(
            f"{out}: not empty and no run of mindferry, --force would delete somebody else's files",
            remedy="choose another --out",
        )


@contextlib.contextmanager
def staged(out: Path, force: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside `out` that becomes `out` when the block ends well.

    An exception or a crash leaves `out` as it was. Leftovers of crashed attempts are removed first.

    Raises:
        UsageError: `out` is taken.
        MindferryError: no space left, or no permission.
    """
    check_free(out, force)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)
        staging = out.parent / f".{out.name}{_PARTIAL}{os.getpid()}"
        staging.mkdir()
    except OSError as err:
        raise UsageError(f"{out}: cannot be created: {err.strerror}", remedy="choose another --out") from None
    try:
        yield staging
        _swap(staging, out)
    except OSError as err:
        if err.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(out.parent).free
            raise MindferryError(
                f"{out}: no space left on the device ({free / 1e6:.0f} MB free)",
                remedy="free some space or choose another --out; nothing was left behind",
                id="disk.full",
            ) from None
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _swap(staging: Path, out: Path) -> None:
    """Move `staging` to `out`, keeping the old `out` until the new one stands."""
    if not out.exists():
        os.rename(staging, out)
        return
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    os.rename(out, old)
    try:
        os.rename(staging, out)
    except OSError:
        os.rename(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_stale(out: Path) -> None:
    """Delete staging directories of `out` whose process is gone."""
    for leftover in out.parent.glob(f".{out.name}{_PARTIAL}*"):
        pid = leftover.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(leftover, ignore_errors=True)
