"""From a path to a `Checkpoint`: a run, a checkpoint of a run, a whole checkpoint, or one cut for ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError
from mindferry.partition import manifest as manifests
from mindferry.partition import rank_files
from mindferry.partition.checkpoint import Checkpoint, Spread
from mindferry.partition.layout import Grid, check_model
from mindferry.partition.network import Network, read_network
from mindferry.spec import ModelSpec
from mindferry.weights.tensor_store import SafetensorsStore, check_link, listing
from mindferry.weights.transforms import TargetLayout

INDEX, SINGLE, OPTIMIZER, STATE = (
    "model.safetensors.index.json",
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
)


@dataclass(frozen=True)
class Asked:
    """What the person says about the checkpoint that is read; None leaves it to the files.

    Attributes:
        config: run directory or training YAML of the network.
        grid: the strategy it is cut for.
        offset, virtual: of its stages.
        layout: packing, where the person knows better than the YAML's defaults.
        step: "{epoch}_{step}" of a cut checkpoint, or the name of a run's checkpoint.
    """

    config: Path | None = None
    grid: Grid | None = None
    offset: Any = None
    virtual: int | None = None
    step: str | None = None
    layout: TargetLayout | None = None


@dataclass(frozen=True)
class Opened:
    """A checkpoint and the network it is of, with the network's own vocabulary (not padded)."""

    checkpoint: Checkpoint
    network: Network


def open_checkpoint(path: Path, asked: Asked) -> Opened:
    """Open what lies at `path` and check every header.

    Raises:
        UsageError: no checkpoint there, or something about it must be said by an option.
        MindferryError: it is incomplete, damaged or of another network.
    """
    if not path.is_dir():
        raise UsageError(
            f"{path}: no such directory",
            remedy="give a run, a checkpoint directory, or a directory with rank_0, rank_1, ...",
            id="partition.no-checkpoint",
        )
    cut = rank_files.is_cut(path)
    opened = _open_cut(path, asked) if cut else _open_whole(path, asked)
    opened.checkpoint.check()
    _check_listed(opened.checkpoint)
    return opened


def _check_listed(checkpoint: Checkpoint) -> None:
    """partition.json and the files name the same tensors."""
    if checkpoint.manifest is None:
        return
    odd = sorted(set(checkpoint.manifest.tensors) ^ {*checkpoint.names(), *checkpoint.scalars()})
    if odd:
        raise MindferryError(
            f"{checkpoint.path / manifests.NAME}: {len(odd)} tensors are listed and not there, or there and not "
            f"listed: {listing(odd)}",
            remedy="cut the checkpoint again",
            id="partition.manifest",
        )


def _open_whole(path: Path, asked: Asked) -> Opened:
    if asked.grid is not None and asked.grid.ranks > 1:
        raise UsageError(
            f"{path}: whole, no rank_0, rank_1, ... in it, and --from says {asked.grid}",
            remedy="leave --from out, or give the directory that holds the ranks' directories",
            id="partition.not-cut",
        )
    network, weights, rest = _whole_files(path, asked)
    files = _weight_files(weights)
    if rest is not None and (rest / OPTIMIZER).is_file():
        files.append(rest / OPTIMIZER)
    state = _state(rest / STATE) if rest is not None and (rest / STATE).is_file() else None
    spread = Spread(network.spec, network.layout, Grid(), check_model(network.spec, Grid(), 0, 1))
    checkpoint = Checkpoint(path, spread, [SafetensorsStore(files)], state=state)
    return Opened(checkpoint, network)


def _whole_files(path: Path, asked: Asked) -> tuple[Network, Path, Path | None]:
    """(network, directory of the weights, directory of optimizer.safetensors and state.json)."""
    inside_run = (path.parent.parent / "run.yaml").is_file() and path.parent.name == "checkpoints"
    if (path / "run.yaml").is_file() or inside_run:
        from mindferry.weights.exporting import locate

        trained = locate(path, asked.step)
        network = read_network(asked.config or trained.run)
        # The migration knows what a YAML cannot say as exactly as itself.
        spec = network.spec if asked.config else trained.spec
        rest = trained.weights.parent if trained.weights.parent.parent.name == "checkpoints" else None
        return (
            _with(network, spec, trained.layout if not asked.config else network.layout),
            trained.weights,
            rest,
        )
    if asked.config is None:
        raise UsageError(
            f"{path}: tensors alone do not say how many heads they have and how they are packed",
            remedy="give --config RUN, or the run's training YAML",
            id="partition.config",
        )
    network = read_network(asked.config)
    nested = path / "model"
    weights = nested if not (path / SINGLE).exists() and not (path / INDEX).exists() else path
    return network, weights, path


def _with(network: Network, spec: ModelSpec, layout: TargetLayout) -> Network:
    return Network(spec, layout, network.grid, network.offset, network.virtual, network.origin)


def _weight_files(weights: Path) -> list[Path]:
    if (weights / INDEX).exists():
        store = SafetensorsStore.open_index(weights / INDEX)
        return sorted({store.location(name) for name in store.names()})
    if not (weights / SINGLE).is_file():
        raise UsageError(
            f"{weights}: no {SINGLE}, no {INDEX} and no rank_0, rank_1, ... in it",
            remedy="give the directory that holds the checkpoint",
            id="partition.no-checkpoint",
        )
    check_link(weights, weights / SINGLE)
    return [weights / SINGLE]


def _state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or type(state.get("step")) is not int:
            raise ValueError("no object with a whole number 'step'")
    except (OSError, ValueError, RecursionError) as err:
        raise MindferryError(
            f"{path}: cannot be read: {err}", remedy="take another checkpoint", id="partition.state"
        ) from None
    return state


def _open_cut(path: Path, asked: Asked) -> Opened:
    if (path / manifests.NAME).is_file() and not (asked.config or asked.grid):
        return _open_ours(path, asked)
    if asked.config is None:
        raise UsageError(
            f"{path}: no {manifests.NAME} in it, so the network is not known",
            remedy="give --config RUN, or the training YAML the ranks ran with"
            if asked.grid
            else "give --config RUN (and --from dp=,mp=,pp= where its parallel_config is another one)",
            id="partition.config",
        )
    network = read_network(asked.config, asked.layout)
    grid = asked.grid or network.grid
    same = grid.pipeline_stage == network.grid.pipeline_stage
    offset = asked.offset if asked.offset is not None else (network.offset if same else 0)
    virtual = asked.virtual or (network.virtual if same else 1)
    files = rank_files.find(path, grid.ranks, asked.step)
    spread = Spread(network.spec, network.layout, grid, check_model(network.spec, grid, offset, virtual))
    checkpoint = _of_files(path, spread, files)
    return Opened(checkpoint, network)


def _open_ours(path: Path, asked: Asked) -> Opened:
    said = manifests.read(path / manifests.NAME)
    if asked.step is not None and asked.step != said.file_suffix:
        raise UsageError(
            f"{path}: --step {asked.step}, {manifests.NAME} describes {said.file_suffix}",
            remedy="leave --step out; for steps that were trained from it, give --config",
            id="partition.step",
        )
    grid = said.grid.grid()
    layout = TargetLayout(
        "flat" if said.use_contiguous_weight_layout_attention else "per_group",
        "interleaved" if said.use_interleaved_weight_layout_mlp else "concatenated",
    )
    padded = said.model.model_copy(update={"vocab_size": said.vocab_rows})
    if said.model.num_layers > len(said.tensors):
        raise MindferryError(
            f"{path / manifests.NAME}: {said.model.num_layers} layers and {len(said.tensors)} tensors",
            remedy="cut the checkpoint again",
            id="partition.manifest",
        )
    stages = check_model(padded, grid, said.offset, said.pp_interleave_num)
    if stages.layers != said.layers:
        raise MindferryError(
            f"{path / manifests.NAME}: layers {said.layers} are not what offset {said.offset} gives",
            remedy="cut the checkpoint again",
            id="partition.manifest",
        )
    files = rank_files.find(path, grid.ranks, said.file_suffix)
    checkpoint = _of_files(path, Spread(padded, layout, grid, stages), files)
    checkpoint.manifest, checkpoint.state = said, said.state
    network = Network(
        said.model, layout, grid, said.offset, said.pp_interleave_num, str(path / manifests.NAME)
    )
    return Opened(checkpoint, network)


def _of_files(path: Path, spread: Spread, files: rank_files.RankFiles) -> Checkpoint:
    checkpoint = Checkpoint(
        path,
        spread,
        [SafetensorsStore([file]) for file in files.files],
        epoch=files.epoch,
        step=files.step,
    )
    if files.passed_over:
        checkpoint.warnings.append(
            f"taken: epoch {files.epoch}, step {files.step}; there too: {', '.join(files.passed_over)}"
        )
    return checkpoint
