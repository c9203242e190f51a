"""Sources: files somebody else wrote become a ModelSpec, weights and weight rules. Nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindferry.errors import UsageError

if TYPE_CHECKING:
    from mindferry.weights.transforms import TargetLayout

from mindferry.sources.config_json import ConfigDecision
from mindferry.sources.source import Source

__all__ = ["ConfigDecision", "Source", "open_source"]


def open_source(
    path: Path,
    *,
    layout: TargetLayout | None = None,
    assume: Mapping[str, Any] | None = None,
    check_tensors: bool = True,
) -> Source:
    """Open the model at `path`, whatever its format.

    Args:
        layout: how fused matrices are to be packed for mindformers; its 1.9.0 defaults unless given.
        assume: spec fields that the source does not state, e.g. {"activation": "gelu_tanh"} for an old
            nanoGPT. A value the source does state is never overruled.
        check_tensors: False leaves out the check that tensors and configuration fit each other.

    Raises:
        UsageError: there is no model at `path`.
        MindferryError: the model is damaged, contradicts itself, or cannot be carried over.
    """
    from mindferry.sources.assemble import Options
    from mindferry.sources.detect import open_any
    from mindferry.weights.transforms import TargetLayout

    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: does not exist", remedy="check the path", id="source.not-found")
    return open_any(path, Options(layout or TargetLayout(), dict(assume or {}), check_tensors))
