"""A checkpoint as one set of whole tensors, whatever strategy it is cut for; read a share at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.partition.layout import Grid, Stages
from mindferry.partition.manifest import Manifest
from mindferry.partition.rules import MAX_SCALAR, Cut, cut_of, layer_of, parameter_of, rule_of
from mindferry.spec import ModelSpec
from mindferry.weights.target import target_names
from mindferry.weights.tensor_store import SafetensorsStore, Shape, listing, same_bits
from mindferry.weights.transforms import TargetLayout


@dataclass(frozen=True)
class Spread:
    """A network over ranks: everything that says which rank holds which numbers.

    Attributes:
        spec: with the vocabulary as it is cut (padded, where it is).
    """

    spec: ModelSpec
    layout: TargetLayout
    grid: Grid
    stages: Stages

    def cut(self, name: str, shape: Shape) -> Cut:
        """How the tensor-parallel ranks share a parameter or moment of whole `shape`."""
        return cut_of(name, shape, self.grid.model_parallel, self.spec, self.layout)


@dataclass
class Checkpoint:
    """The tensors of a checkpoint by name; `check` must have passed before anything is read.

    Attributes:
        stores: one for each rank.
        take_first: go on where copies of one thing differ, with the first of them.
    """

    path: Path
    spread: Spread
    stores: list[SafetensorsStore]
    manifest: Manifest | None = None
    state: dict[str, Any] | None = None
    epoch: int = 0
    step: int = 0
    take_first: bool = False
    warnings: list[str] = field(default_factory=list)
    _seen: set[tuple[str, int, int]] = field(default_factory=set)
    _slices: dict[str, int] = field(default_factory=dict)
    _where: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _files: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _cuts: dict[str, Cut] = field(default_factory=dict)
    _known: dict[str, Shape] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known = target_names(self.spread.spec)

    def names(self) -> list[str]:
        """Parameters in network order, then moments in the same order."""
        order = {name: number for number, name in enumerate(self._known)}
        found = {name for store in self.stores for name in store.names() if not self.is_scalar(name)}
        prefix = {name: name.removesuffix(parameter_of(name)) for name in found}
        return sorted(found, key=lambda name: (prefix[name], order[parameter_of(name)]))

    def scalars(self) -> list[str]:
        """What every rank has once: global_step and the like."""
        return sorted({name for store in self.stores for name in store.names() if self.is_scalar(name)})

    def is_scalar(self, name: str) -> bool:
        """True for names that are no parameter's and hold at most one number."""
        if parameter_of(name) in self._known:
            return False
        store = next(store for store in self.stores if name in store)
        return int(np.prod(store.shape(name))) <= MAX_SCALAR

    def cut(self, name: str) -> Cut:
        """How the ranks of the checkpoint share `name`."""
        if name not in self._cuts:
            self._cuts[name] = self.spread.cut(name, self._known[parameter_of(name)])
        return self._cuts[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._owner(name, 0).dtype(name)

    def scalar(self, name: str) -> np.ndarray:
        """The value of a scalar, the same on every rank."""
        return np.array(next(store for store in self.stores if name in store).read(name))

    def share(self, name: str, cut: Cut, rank: int) -> np.ndarray:
        """What tensor-parallel rank `rank` holds of `name` under another `cut`.

        Rows that only pad the vocabulary there are zeros; rows that only pad it here are left out. At most this
        array is allocated, nothing where the share lies in one piece of one file.
        """
        own = self.cut(name)
        if own.dim is None or own == cut:
            return self._read(name, 0 if own.dim is None else rank)
        result: np.ndarray | None = None
        for source in range(own.ranks):
            pairs = overlaps(own.ranges(source), cut.ranges(rank))
            if not pairs:
                continue
            data = self._read(name, source)
            if len(pairs) == 1 and pairs[0][2] == cut.local_shape[own.dim]:
                return data[own.at(pairs[0][0], pairs[0][0] + pairs[0][2])]
            if result is None:
                result = np.zeros(cut.local_shape, self.dtype(name))
            for here, there, count in pairs:
                result[own.at(there, there + count)] = data[own.at(here, here + count)]
        return np.zeros(cut.local_shape, self.dtype(name)) if result is None else result

    def whole(self, name: str, shape: Shape) -> Callable[[], np.ndarray]:
        """Makes the whole tensor `name`; `shape` has the rows wanted of a padded vocabulary."""
        cut = Cut(shape, 1, self.cut(name).dim, (shape[self.cut(name).dim or 0],))
        return lambda: self.share(name, cut, 0)

    def release(self, name: str) -> None:
        """Give back the pages of `name`."""
        for store in self.stores:
            if name in store:
                store.release(name)

    def _stages_of(self, name: str) -> tuple[int, ...]:
        if name not in self._where:
            self._where[name] = self.spread.stages.of(name)
        return self._where[name]

    def slices(self, name: str) -> int:
        """Into how many pieces along dimension 0 the ranks that hold a share have divided it; 1 for copies.

        With enable_parallel_optimizer MindSpore keeps on each replica only its piece of parameters and moments
        (those that divide and are large enough), and the shapes show it. Pieces go round the replicas in rank order.
        """
        if name not in self._slices:
            self._slices[name] = self._count_slices(name)
        return self._slices[name]

    def _count_slices(self, name: str) -> int:
        local = self.cut(name).local_shape
        stage = self._stages_of(name)[0]
        ranks = range(self.spread.grid.ranks // self.spread.grid.pipeline_stage)
        stores = [self.stores[stage * len(ranks) + rank] for rank in ranks]
        found = next((store.shape(name) for store in stores if name in store), local)
        whole = self.cut(name).dim is None
        replicas = len(ranks) if whole else self.spread.grid.data_parallel
        fits = len(found) == len(local) > 0 and found[1:] == local[1:] and 0 < found[0] < local[0]
        count = local[0] // found[0] if fits and local[0] % found[0] == 0 else 1
        return count if replicas % count == 0 else 1

    def _owner(self, name: str, tensor: int, piece: int = 0) -> SafetensorsStore:
        """The first rank that has the share: the first replica's, unless copies were left out on saving."""
        return next(store for store, _ in self._holders(name, tensor, piece))

    def _read(self, name: str, tensor: int) -> np.ndarray:
        """The share of one tensor-parallel rank, after its copies and its checksum were looked at once."""
        pieces = []
        for piece in range(self.slices(name)):
            pieces.append(self._owner(name, tensor, piece).read(name))
            if (name, tensor, piece) not in self._seen:
                self._seen.add((name, tensor, piece))
                self._verify(name, tensor, piece, pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _verify(self, name: str, tensor: int, piece: int, array: np.ndarray) -> None:
        at = self._owner(name, tensor, piece).location(name)
        if self.manifest is not None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            found, expected = hashlib.sha256(data).hexdigest(), self.manifest.tensors[name].sha256[tensor]  # type: ignore[arg-type]
            if found != expected:
                raise MindferryError(
                    f"{at}: {name}: sha256 {found[:12]}..., partition.json says {expected[:12]}...",
                    remedy="the file was damaged or replaced after the cut; bring the right one, or remove "
                    "partition.json and give --config and --from if training wrote it",
                    id="partition.checksum",
                )
        for other, stage in self._holders(name, tensor, piece):
            path = other.location(name)
            if self._file(path) == self._file(at) or same_bits(other.read(name), array):
                continue
            if stage != self._stages_of(name)[0]:
                # MindSpore sends the first stage's table to the last one at every step: the first is the true one.
                self.warnings.append(f"{path}: {name} differs from the first stage's, which was taken")
            elif not self.take_first:
                raise MindferryError(
                    f"{path}: {name} differs from {at}, and both should hold the same numbers",
                    cause="files of different moments, or ranks that drifted apart",
                    remedy="bring the files of one moment, or --take-first to go on with the first rank's",
                    id="partition.copies-differ",
                )

    def _file(self, path: Path) -> tuple[int, int]:
        """Device and inode: hard links of one file need no comparison."""
        if path not in self._files:
            status = path.stat()
            self._files[path] = (status.st_dev, status.st_ino)
        return self._files[path]

    def _holders(self, name: str, tensor: int, piece: int = 0) -> Iterable[tuple[SafetensorsStore, int]]:
        """The ranks that have the same piece of the same share, and their stages: replicas, stages of a tied table,
        and every tensor-parallel rank for what is whole."""
        grid, whole, count = self.spread.grid, self.cut(name).dim is None, self.slices(name)
        tensors = range(grid.model_parallel) if whole else (tensor,)
        for stage in self._stages_of(name):
            for data in range(grid.data_parallel):
                for number in tensors:
                    replica = data * grid.model_parallel + number if whole else data
                    store = self.stores[grid.rank(stage, data, number)]
                    if replica % count == piece and name in store:
                        yield store, stage

    def check(self) -> None:
        """Names, shapes and types of every rank against the network and against each other, from headers alone.

        Raises:
            MindferryError: the first thing that does not fit, with the file.
        """
        everything = {name for store in self.stores for name in store.names()}
        moments = {name for name in everything if parameter_of(name) != name}
        for rank, store in enumerate(self.stores):
            stage = self.spread.grid.place(rank).stage
            # A set would lose the order; a dict keeps it and is as quick to ask.
            wanted = {n: None for n in (*self._known, *sorted(moments)) if self._belongs(n, stage)}
            self._check_names(rank, store, wanted)
        self._check_complete(moments)
        for store in self.stores:
            for name in store.names():
                if parameter_of(name) in self._known:
                    self._check_tensor(store, name)
        self._check_scalars(everything)

    def _check_complete(self, moments: set[str]) -> None:
        """Where copies were left out on saving (remove_redundancy), every share is still on some rank."""
        ranks = range(self.spread.grid.model_parallel)
        for name in (*self._known, *sorted(moments)):
            if parameter_of(name) not in self._known:
                continue
            pieces = range(self.slices(name))
            lost = [
                r for r in ranks for piece in pieces if not any(True for _ in self._holders(name, r, piece))
            ]
            if lost:
                raise MindferryError(
                    f"{self.path}: {name}: no rank has share {lost[0]} of {len(ranks)}",
                    cause="the files were written without redundancy, and one that is needed is missing",
                    remedy="bring the files of all ranks",
                    id="partition.missing-tensor",
                )

    def _belongs(self, name: str, stage: int) -> bool:
        if parameter_of(name) not in self._known:
            return False
        return stage in self._stages_of(name)

    def _check_names(self, rank: int, store: SafetensorsStore, wanted: dict[str, None]) -> None:
        found = set(store.names())
        at = store.location(store.names()[0]) if found else self.path / f"rank_{rank}"
        stage = self.spread.grid.place(rank).stage
        missing = [n for n in wanted if n not in found and self._stages_of(n)[0] == stage]
        if missing and not _without_copies(store):
            raise MindferryError(
                f"{at}: rank {rank} lacks {len(missing)} tensors of its stage: {listing(missing)}",
                cause=f"{self.spread.grid}, layers of the stages {self.spread.stages.counts()}",
                remedy="the strategy, the offset or the network is another one: give --from and --config as the "
                "run had them",
                id="partition.missing-tensor",
            )
        for name in store.names():
            if name in wanted or self.is_scalar(name):
                continue
            if parameter_of(name) in self._known:
                why, fix = "belongs to another stage", "give --from and the offset as the run had them"
            elif layer_of(name) is not None and layer_of(name) >= self.spread.spec.num_layers:  # type: ignore[operator]
                why, fix = f"num_layers is {self.spread.spec.num_layers}", "give the run's own --config"
            else:
                rule_of(name)
                why, fix = "the network has no such parameter", "give the run's own --config"
            raise MindferryError(f"{at}: {name}: {why}", remedy=fix, id="partition.surplus-tensor")

    def _check_tensor(self, store: SafetensorsStore, name: str) -> None:
        expected, found = self.cut(name).local_shape, store.shape(name)
        if self.slices(name) > 1:
            expected = (expected[0] // self.slices(name), *expected[1:])
        if found != expected:
            raise MindferryError(
                f"{store.location(name)}: {name}: found {list(found)}, expected {list(expected)} "
                f"(whole {list(self.cut(name).shape)}, mp={self.spread.grid.model_parallel})",
                remedy="give --from and --config as the run had them",
                id="partition.shape",
            )
        if store.dtype(name) != self.dtype(name):
            raise MindferryError(
                f"{store.location(name)}: {name} is {store.dtype(name)}, on another rank {self.dtype(name)}",
                remedy="bring the files of one checkpoint",
                id="partition.dtype",
            )

    def _check_scalars(self, everything: set[str]) -> None:
        for name in sorted(everything):
            if not self.is_scalar(name):
                continue
            value = None
            for rank, store in enumerate(self.stores):
                if name not in store and _without_copies(store):
                    continue
                found = store.read(name) if name in store else None
                if value is None and rank and any(map(_without_copies, self.stores[:rank])):
                    value = found
                if rank and (found is None or value is None or not same_bits(found, value)):
                    raise MindferryError(
                        f"{self.path}: {name} is {_shown(value)} on rank 0 and {_shown(found)} on rank {rank}",
                        cause="the ranks' files were not written at the same step",
                        remedy="bring the files of one step",
                        id="partition.mixed-steps",
                    )
                value = found


def _without_copies(store: SafetensorsStore) -> bool:
    """Saved with remove_redundancy: what another rank has, too, may be missing."""
    return store.metadata.get("remove_redundancy") == "True"


def _shown(value: np.ndarray | None) -> str:
    return "missing" if value is None else str(np.asarray(value).reshape(-1)[:1].tolist())


def overlaps(here: list[tuple[int, int]], there: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Where two lists of ranges of one dimension meet: (offset in `here`, offset in `there`, length), offsets
    counted in what each list holds."""
    result = []
    at_here = 0
    for a, b in here:
        at_there = 0
        for c, d in there:
            begin, end = max(a, c), min(b, d)
            if begin < end:
                result.append((at_here + begin - a, at_there + begin - c, end - begin))
            at_there += d - c
        at_here += b - a
    return result
