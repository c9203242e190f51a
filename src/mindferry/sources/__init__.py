"""Sources: files somebody else wrote become a ModelSpec, weights and weight rules. Nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mindferry.errors import UsageError

if TYPE_CHECKING:
    from mindferry.weights.transforms import TargetLayout

from mindferry.sources.config_json import ConfigDecision
from mindferry.sources.source import Source

__all__ = ["ConfigDecision", "Source", "open_source"]


def open_source(path: Path, *, layout: TargetLayout | None = None) -> Source:
    """Open the model at `path`, whatever its format.

    Args:
        layout: how fused matrices are to be packed for mindformers; its 1.9.0 defaults unless given.

    Raises:
        UsageError: there is no model at `path`.
        MindferryError: the model is damaged, contradicts itself, or cannot be carried over.
    """
    from mindferry.sources.huggingface import open_huggingface

    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: does not exist", remedy="check the path", id="source.not-found")
    if path.is_dir():
        return open_huggingface(path, layout)
    raise UsageError(
        f"{path}: not a model directory",
        remedy="give a Hugging Face directory (config.json and model.safetensors)",
        id="source.unknown-format",
    )
