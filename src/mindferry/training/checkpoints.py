"""Checkpoints that are complete or not there: written aside, hashed, renamed.

Layout of checkpoints/step-00000020/:
  model/model.safetensors   the weights, under GPTModel's parameter names
  optimizer.safetensors     everything else the step carries (moments, global_step, loss scale)
  state.json                step, samples seen, seed and what the run needs to go on
  manifest.json             size and sha256 of each file above; written last
A directory without a manifest that fits is never resumed from.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.targets.run_directory import sync_directory

_NAME = re.compile(r"^step-(\d{8,})$")
MODEL = "model/model.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.path / "model"

    def optimizer(self) -> dict[str, np.ndarray]:
        """Optimizer and step state by parameter name."""
        from safetensors.numpy import load_file

        return load_file(self.path / OPTIMIZER)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def save(
    root: Path,
    step: int,
    model: dict[str, np.ndarray],
    optimizer: dict[str, np.ndarray],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write checkpoint number `step` under `root` and drop all but the newest `keep`.

    Raises:
        MindferryError: no space; the checkpoints that were there stay.
    """
    from safetensors.numpy import save as to_bytes

    final = root / f"step-{step:08d}"
    partial = root / f".step-{step:08d}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        (partial / "model").mkdir(parents=True)
        contents = {
            # "np": mindformers' readers take any; transformers-style readers want a format.
            MODEL: to_bytes(model, metadata={"format": "np"}),
            OPTIMIZER: to_bytes(optimizer, metadata={"format": "np"}),
            STATE: json.dumps(state, indent=2).encode(),
        }
        manifest = {}
        for name, data in contents.items():
            _write(partial / name, data)
            manifest[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        _write(partial / MANIFEST, json.dumps({"step": step, "files": manifest}, indent=2).encode())
        sync_directory(partial / "model")
        sync_directory(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(partial, final)
        sync_directory(root)
    except OSError as err:
        shutil.rmtree(partial, ignore_errors=True)
        raise MindferryError(
            f"{final}: checkpoint not written: {err.strerror or err}",
            remedy="free some space; earlier checkpoints are intact",
            id="checkpoint.write",
        ) from err
    _drop_old(root, keep)
    return final


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _steps(root: Path) -> list[tuple[int, Path]]:
    """Committed checkpoint directories, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in root.iterdir() if (m := _NAME.match(p.name)) and p.is_dir()]
    return sorted(found)


def _drop_old(root: Path, keep: int) -> None:
    for _, path in _steps(root)[: -max(keep, 1)]:
        shutil.rmtree(path, ignore_errors=True)


def clean_partial(root: Path) -> None:
    """Delete what crashed saves left behind."""
    if root.is_dir():
        for leftover in root.glob(".step-*.partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def problem_with(path: Path) -> str:
    """Why the checkpoint at `path` is not complete, or '' when it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        for name in (MODEL, OPTIMIZER, STATE):
            entry = files[name]
            actual = (path / name).stat().st_size
            if actual != entry["bytes"]:
                return f"{name} has {actual} bytes, its manifest says {entry['bytes']}"
            if _sha256(path / name) != entry["sha256"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError as err:
        return f"{Path(str(err.filename)).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as err:
        return f"{MANIFEST} cannot be read: {err}"
    return ""


def opened(path: Path) -> Checkpoint:
    """The checkpoint at `path`, which `newest` has found complete."""
    state = json.loads((path / STATE).read_text(encoding="utf-8"))
    return Checkpoint(path, int(state["step"]), state)


def newest(root: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete checkpoint under `root`, and why newer ones were passed over."""
    skipped = []
    for _, path in reversed(_steps(root)):
        problem = problem_with(path)
        if problem:
            skipped.append(f"{path.name}: {problem}")
            continue
        return opened(path), skipped
    return None, skipped
