"""reshard: a checkpoint cut for one strategy becomes one cut for another, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.partition.checkpoint import Checkpoint, Spread
from mindferry.partition.layout import Grid, check_model
from mindferry.partition.network import Network
from mindferry.partition.opening import Asked, open_checkpoint
from mindferry.partition.writing import Progress, bytes_for, check_space, write_ranks, write_whole
from mindferry.planning.rules_model import padded_vocab
from mindferry.targets.run_directory import staged


@dataclass(frozen=True)
class Wanted:
    """The strategy to write; None leaves it to the network's YAML where that has as many stages, else even.

    Attributes:
        offset: model_config.offset.
        virtual: model_config.pp_interleave_num.
        pad_vocab: add rows of zeros to the word table and the head until tensor parallel divides them.
        take_first: where copies differ, go on with the first.
    """

    grid: Grid
    offset: Any = None
    virtual: int | None = None
    pad_vocab: bool = False
    take_first: bool = False


@dataclass
class ReshardReport:
    """What was written.

    Attributes:
        keys: of the training YAML that loads it, dotted.
        bytes: on disk; replicas that are hard links count once.
    """

    out: str
    source: str
    source_grid: dict[str, int]
    grid: dict[str, int]
    layers: list[int]
    step: int | None
    tensors: int
    bytes: int
    vocab_rows: int
    keys: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def reshard(
    path: Path, out: Path, asked: Asked, wanted: Wanted, progress: Progress | None = None
) -> ReshardReport:
    """Write the checkpoint at `path` into the new directory `out` for another strategy.

    Raises:
        UsageError: a strategy that the network does not divide into, or something that an option must say.
        MindferryError: the checkpoint is incomplete or damaged; `out` is not there then.
    """
    opened = open_checkpoint(path, asked)
    source, network = opened.checkpoint, opened.network
    source.take_first = wanted.take_first
    spread, offset, virtual = target_spread(network, wanted, source)
    tick = progress or (lambda done, name: None)
    with staged(out) as staging:
        needed = bytes_for(source, spread)
        check_space(staging, needed)
        if wanted.grid.ranks == 1:
            tensors = write_whole(source, spread, staging, tick)
        else:
            tensors = len(write_ranks(source, spread, network, offset, virtual, staging, tick).tensors)
    return ReshardReport(
        out=str(out),
        source=str(source.path),
        source_grid=vars(source.spread.grid),
        grid=vars(wanted.grid),
        layers=spread.stages.counts(),
        step=source.state["step"] if source.state else (source.step or None),
        tensors=tensors,
        bytes=needed,
        vocab_rows=spread.spec.vocab_size,
        keys=loading_keys(spread, offset, virtual, out),
        warnings=[*source.warnings, *_notes(source, spread, network)],
    )


def target_spread(network: Network, wanted: Wanted, source: Checkpoint | None) -> tuple[Spread, Any, int]:
    """(how the wanted ranks hold the network, offset, virtual stages), checked."""
    grid = wanted.grid
    same = grid.pipeline_stage == network.grid.pipeline_stage
    offset = wanted.offset if wanted.offset is not None else (network.offset if same else 0)
    virtual = wanted.virtual or (network.virtual if same else 1)
    if grid.pipeline_stage == 1:
        offset, virtual = 0, 1
    if virtual > 1 and grid.pipeline_stage * virtual > network.spec.num_layers:
        raise UsageError(
            f"{grid}: {virtual} virtual stages a stage are more than {network.spec.num_layers} layers",
            remedy="lower --interleave",
            id="partition.layers",
        )
    spec = network.spec
    if wanted.pad_vocab:
        rows = padded_vocab(spec.vocab_size, grid.model_parallel)
        spec = spec.model_copy(update={"vocab_size": rows})
    stages = check_model(spec, grid, offset, virtual)
    return Spread(spec, network.layout, grid, stages), offset, virtual


def loading_keys(spread: Spread, offset: Any, virtual: int, out: Path) -> dict[str, Any]:
    """What the training YAML must say to load the result, as dotted keys."""
    keys: dict[str, Any] = {"load_checkpoint": str(out if spread.grid.ranks > 1 else out / "model")}
    if spread.grid.ranks > 1:
        keys |= {
            "load_ckpt_format": "safetensors",
            "auto_trans_ckpt": False,
            "use_parallel": True,
            "parallel.parallel_mode": 1,
            # With it MindSpore would want each replica's piece of a share in its file.
            "parallel.enable_parallel_optimizer": False,
            "parallel_config.data_parallel": spread.grid.data_parallel,
            "parallel_config.model_parallel": spread.grid.model_parallel,
            "parallel_config.pipeline_stage": spread.grid.pipeline_stage,
            "model.model_config.offset": offset,
            "model.model_config.pp_interleave_num": virtual,
            "model.model_config.vocab_size": spread.spec.vocab_size,
        }
        packing = spread.layout.config()
        keys |= {f"model.model_config.{name}": value for name, value in packing.items()}
    return keys


def _notes(source: Checkpoint, spread: Spread, network: Network) -> list[str]:
    notes = []
    pieces = [name for name in source.names() if source.slices(name) > 1]
    if pieces:
        notes.append(
            f"{len(pieces)} tensors were shared out over the replicas (enable_parallel_optimizer) and put together"
        )
    before, after = source.spread.spec.vocab_size, spread.spec.vocab_size
    if after > before:
        notes.append(
            f"the vocabulary was padded from {before} to {after} rows with zeros: an untrained logit of 0 takes part "
            "in every softmax, so losses are not exactly those of the model without it"
        )
    elif after < before:
        notes.append(f"{before - after} rows that only padded the vocabulary were left out")
    packed = network.layout.qkv == "flat" or (
        network.spec.gated_linear_unit and network.layout.gate_up == "concatenated"
    )
    if packed and spread.grid.model_parallel > 1:
        notes.append(
            "contiguous packing: each rank got its heads' [q | k | v] (and [gate; up]), as the network reads its own "
            "rows; MindSpore's slicing (auto_trans_ckpt: True) takes plain rows and would train another model"
        )
    return notes
