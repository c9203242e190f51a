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


def read_network(path: Path, layout: TargetLayout | None = None) -> Network:
    """The network of a run directory, or of a training YAML (ours or mindformers').

    Args:
        layout: packing, where it is known already.

    Raises:
        UsageError: no such file, no training YAML, or the YAML does not say the packing.
        MindferryError: it leaves out what changes the network.
    """
    from mindferry.planning import runfile
    from mindferry.sources import mindformers_mcore

    file = path / "run.yaml" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"{file}: no such file", remedy="give a run directory or its training YAML", id="partition.config"
        )
    spec, packing = mindformers_mcore.read_network(file, layout)
    at = runfile.read(file, model=spec).layout
    if at.pipeline_scheduler == "zero_bubble_v":
        raise UsageError(
            f"{file}: parallel.pipeline_config.pipeline_scheduler zero_bubble_v puts the head on the first stage and "
            "folds the others, which is not handled here",
            remedy="take 1f1b",
            id="partition.scheduler",
        )
    degrees = (at.data_parallel * max(at.context_parallel, 1), at.model_parallel, at.pipeline_stage)
    return Network(spec, packing, Grid(*degrees), at.offset, at.virtual, str(file))
