"""Which rank does what: places in the grid of ranks, communication groups, layers of each stage.

mindformers numbers ranks with the pipeline stage outermost, then data parallel, tensor parallel innermost:
rank = (stage * dp + data) * mp + tensor (MindSpore puts device_num / pipeline_stages consecutive ranks into a
stage; mindformers' device_matrix.py orders the rest dp, cp, tp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindferry.errors import UsageError
from mindferry.partition.rules import check_keys, layer_of, parameter_of, rule_of
from mindferry.planning.strategy import place_layers
from mindferry.spec import ModelSpec
from mindferry.weights.target import target_names

MAX_RANKS = 1 << 16
MAX_LAYERS = 100_000  # every layer's parameters are spelled out; a damaged file must not make that endless
_NAMES = {"dp": "data_parallel", "mp": "model_parallel", "pp": "pipeline_stage"}
_ALIASES = {"tp": "mp", "data_parallel": "dp", "model_parallel": "mp", "pipeline_stage": "pp"}


@dataclass(frozen=True)
class Grid:
    """Degrees of parallelism, in run.yaml's words.

    Attributes:
        data_parallel: replicas of the model.
        model_parallel: ranks that share each matrix (tensor parallel).
        pipeline_stage: groups of layers.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    pipeline_stage: int = 1

    @property
    def ranks(self) -> int:
        return self.data_parallel * self.model_parallel * self.pipeline_stage

    def place(self, rank: int) -> Place:
        """Where `rank` stands."""
        rest, tensor = divmod(rank, self.model_parallel)
        stage, data = divmod(rest, self.data_parallel)
        return Place(stage, data, tensor)

    def rank(self, stage: int, data: int, tensor: int) -> int:
        """The rank that stands there."""
        return (stage * self.data_parallel + data) * self.model_parallel + tensor

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share each matrix: one group for each stage and replica."""
        return self._groups(2)

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same numbers and average gradients: one group for each stage and share."""
        return self._groups(1)

    def pipeline_groups(self) -> list[list[int]]:
        """Ranks that hand activations on, first stage first: one group for each replica and share."""
        return self._groups(0)

    def _groups(self, axis: int) -> list[list[int]]:
        grid = np.arange(self.ranks).reshape(self.pipeline_stage, self.data_parallel, self.model_parallel)
        return np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis]).tolist()

    def __str__(self) -> str:
        return f"dp={self.data_parallel},mp={self.model_parallel},pp={self.pipeline_stage}"


@dataclass(frozen=True)
class Place:
    """A rank's stage, replica and share."""

    stage: int
    data: int
    tensor: int


def parse_grid(text: str, option: str = "--to") -> Grid:
    """`dp=2,mp=2,pp=2` as a Grid; what is left out is 1. `tp` and run.yaml's long names mean the same.

    Raises:
        UsageError: anything else.
    """
    values: dict[str, int] = {}
    for item in text.replace(" ", "").split(","):
        key, sign, number = item.partition("=")
        short = _ALIASES.get(key, key)
        good = (
            sign
            and short in _NAMES
            and number.isascii()
            and number.isdigit()
            and 0 < int(number) <= MAX_RANKS
        )
        if not good or short in values:
            what = "is given twice" if short in values and good else "is not dp=N, mp=N or pp=N"
            raise UsageError(
                f"{option} {text!r}: {item!r} {what}",
                remedy=f"write it like {option} dp=2,mp=2,pp=2 (whole numbers from 1)",
                id="partition.strategy",
            )
        values[short] = int(number)
    grid = Grid(**{_NAMES[key]: value for key, value in values.items()})
    if grid.ranks > MAX_RANKS:
        raise UsageError(
            f"{option} {text!r}: {grid.ranks} ranks, the limit is {MAX_RANKS}", id="partition.strategy"
        )
    return grid


def check_devices(grid: Grid, devices: int) -> None:
    """Refuse a grid that is not `devices` ranks.

    Raises:
        UsageError: dp * mp * pp is another number.
    """
    if grid.ranks != devices:
        raise UsageError(
            f"{grid}: {grid.data_parallel} x {grid.model_parallel} x {grid.pipeline_stage} = {grid.ranks} ranks, "
            f"found {devices} devices",
            remedy="choose dp, mp and pp whose product is the number of devices",
            id="partition.devices",
        )


@dataclass(frozen=True)
class Stages:
    """Which layers each pipeline stage holds.

    Attributes:
        layers: of each stage, ascending. Virtual stages make a stage's layers lie apart.
        tied: the head is the word table, which the last stage then needs, too.
    """

    layers: tuple[tuple[int, ...], ...]
    tied: bool

    def of(self, name: str) -> tuple[int, ...]:
        """Stages that hold a parameter or moment; the first of them owns it.

        Raises:
            MindferryError: no such parameter.
            KeyError: a layer that no stage holds.
        """
        place, last = rule_of(name).place, len(self.layers) - 1
        if place == "last":
            return (last,)
        if place == "first":
            shared = self.tied and last > 0 and parameter_of(name) == "embedding.word_embeddings.weight"
            return (0, last) if shared else (0,)
        layer = layer_of(name)
        for stage, held in enumerate(self.layers):
            if layer in held:
                return (stage,)
        raise KeyError(name)

    def counts(self) -> list[int]:
        """Layers of each stage."""
        return [len(held) for held in self.layers]


def stages_of(spec: ModelSpec, stages: int, offset: Any = 0, virtual: int = 1) -> Stages:
    """The layers that mindformers' LayerSetting gives each of `stages`.

    Args:
        offset: model_config.offset: 0, a list of one number a stage, or such a list for each virtual stage.
        virtual: model_config.pp_interleave_num.

    Raises:
        UsageError: layers that do not divide and an offset that does not place them.
    """
    if stages == 1:
        return Stages((tuple(range(spec.num_layers)),), spec.tie_word_embeddings)
    _check_offset(spec.num_layers, stages, offset, virtual)
    rows = place_layers(spec.num_layers, stages, virtual, offset)
    held: list[list[int]] = [[] for _ in range(stages)]
    begin = 0
    for row in rows:
        for stage, count in enumerate(row):
            held[stage] += range(begin, begin + count)
            begin += count
    return Stages(tuple(map(tuple, held)), spec.tie_word_embeddings)


def _check_offset(layers: int, stages: int, offset: Any, virtual: int) -> None:
    """What LayerSetting._check_inputs refuses, and the broadcast that would promise layers twice."""
    base, left = divmod(layers, stages * virtual)
    array = np.asarray(offset)
    if array.dtype.kind not in "iu" or array.ndim > 2:
        problem = "is not 0, a list of whole numbers, or one such list a virtual stage"
    elif array.ndim and array.shape[-1] != stages:
        problem = f"has {array.shape[-1]} numbers, expected one for each of the {stages} stages"
    elif array.ndim == 2 and array.shape[0] != virtual:
        problem = f"has {array.shape[0]} rows, expected one for each of {virtual} virtual stages"
    elif np.broadcast_to(array, (virtual, stages)).sum() != left or array.sum() != left:
        problem = f"adds up to {array.sum()}, expected {left} ({layers} layers on {stages * virtual} stages)"
    elif (np.broadcast_to(array, (virtual, stages)) + base < 1).any():
        problem = "leaves a stage without a layer"
    else:
        return
    example = [1 if i and i <= left else 0 for i in range(stages)] if left < stages else [0] * stages
    raise UsageError(
        f"pp={stages}: num_layers {layers}, offset {offset}: the offset {problem}",
        remedy=f"give an offset such as {example}"
        if virtual == 1 and left
        else "choose another pp or offset",
        id="partition.layers",
    )


def check_model(spec: ModelSpec, grid: Grid, offset: Any = 0, virtual: int = 1) -> Stages:
    """Everything about `spec` that `grid` must divide; the layers of each stage.

    Raises:
        UsageError: the first size that does not divide, with its key.
    """
    if spec.num_layers > MAX_LAYERS:
        raise UsageError(f"num_layers {spec.num_layers}: the limit is {MAX_LAYERS}", id="partition.layers")
    keys = [key for name in target_names(spec) for key in rule_of(name).keys]
    check_keys(tuple(dict.fromkeys(keys)), spec, grid.model_parallel)
    return stages_of(spec, grid.pipeline_stage, offset, virtual)


def ranks(grid: Grid) -> Iterator[tuple[int, Place]]:
    """Every rank and its place."""
    for number in range(grid.ranks):
        yield number, grid.place(number)
