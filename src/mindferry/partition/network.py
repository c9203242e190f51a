"""What resharding must know of a network: its sizes, packings and stages, read from a run or a training YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.partition.layout import Grid
from mindferry.spec import ModelSpec
from mindferry.weights.transforms import TargetLayout


@dataclass(frozen=True)
class Network:
    """A network and how a training YAML spreads it.

    Attributes:
        layout: packing of the fused matrices.
        grid: the YAML's degrees. Context parallel counts as data parallel: its ranks hold the same numbers, and
            stand between data and tensor parallel ranks.
        offset, virtual: model_config's offset and pp_interleave_num.
        origin: the file, for messages.
    """

    spec: ModelSpec
    layout: TargetLayout
    grid: Grid
    offset: Any
    virtual: int
    origin: str


def packing(model_config: dict[str, Any]) -> TargetLayout:
    """The packings that a `model_config` states, or mindformers 1.9.0's defaults."""
    return TargetLayout(
        "flat" if model_config.get("use_contiguous_weight_layout_attention") else "per_group",
        "interleaved" if model_config.get("use_interleaved_weight_layout_mlp", True) else "concatenated",
    )


def read_network(path: Path) -> Network:
    """The network of a run directory, or of a training YAML (ours or mindformers').

    Raises:
        UsageError: no such file, no training YAML, or sizes are missing in it.
    """
    from mindferry.planning import runfile
    from mindferry.planning.settings import load_yaml

    file = path / "run.yaml" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"{file}: no such file", remedy="give a run directory or its training YAML", id="partition.config"
        )
    read = runfile.read(file)
    if read.model is None:
        raise UsageError(
            f"{file}: model.model_config lacks {', '.join(read.missing)}",
            remedy="write the sizes of the model into the YAML",
            id="partition.config",
        )
    at = read.layout
    degrees = (at.data_parallel * max(at.context_parallel, 1), at.model_parallel, at.pipeline_stage)
    config = load_yaml(file)["model"]["model_config"]
    return Network(read.model, packing(config), Grid(*degrees), at.offset, at.virtual, str(file))
