"""Megatron-LM's optimizer in model_optim_rng.pt: moments, float32 masters, loss scale, over all ranks and stages.

Layout (megatron/core/optimizer/optimizer.py): FP32Optimizer saves the torch optimizer's state dict itself;
Float16OptimizerWithFloat16Params saves `{"optimizer": that, "fp32_from_fp16_params": [[tensor, ...], ...],
"grad_scaler": {...}}`, with one list of masters for each parameter group. States are numbered by place in the
groups; the order inside a group is that of the rank's named_parameters(), which is the order of its `model` table.
The distributed optimizer keeps its states elsewhere (distrib_optim.pt) and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.sources.megatron_shards import (
    Heads,
    Shard,
    is_checkpoint,
    iteration_directory,
    merge,
    read_shards,
)
from mindferry.sources.pickled import load_pickled
from mindferry.sources.source import Source

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"


@dataclass
class Found:
    """What all shards hold, whole and under the names of the weight rules.

    Attributes:
        tensors: kind ("exp_avg", "exp_avg_sq", "master") -> name -> float32 array.
        step: updates made.
        group: settings of the decayed parameters' group.
        scale, growth: dynamic loss scale, and good steps since it last changed.
    """

    step: int
    group: Mapping[str, Any]
    tensors: dict[str, dict[str, np.ndarray]]
    scale: float | None = None
    growth: int = 0
    warnings: list[str] = field(default_factory=list)


def is_megatron(path: Path) -> bool:
    """A Megatron-LM checkpoint, one of its directories, or a rank's file."""
    return is_checkpoint(path) if path.is_dir() else path.parent.name.startswith("mp_rank_")


def read(path: Path, source: Source, unfit: Callable[[Path, str], MindferryError]) -> Found:
    """All shards of the checkpoint at `path`.

    Args:
        unfit: makes the error for a state that does not belong to these weights.

    Raises:
        UsageError: no optimizer state there, or that of the distributed optimizer.
        MindferryError: it belongs to other weights, or is damaged.
    """
    if source.format != "megatron":
        raise UsageError(
            f"{path}: a Megatron-LM optimizer, but the weights are {source.format}",
            remedy="give the Megatron-LM checkpoint as SRC, too",
            id="optimizer.kind",
        )
    shards = read_shards(iteration_directory(path if path.is_dir() else path.parent))
    parts: dict[str, list[Shard]] = {}
    states = [_Rank(shard, source, unfit) for shard in shards]
    if len({state.step for state in states}) > 1:
        raise unfit(path, f"ranks have made different numbers of steps: {sorted({s.step for s in states})}")
    for kind in (*MOMENTS, MASTER):
        have = [state for state in states if state.chunks.get(kind)]
        if not have:
            continue
        if len(have) != len(states):
            raise unfit(path, f"{kind} is there for {len(have)} of {len(states)} shards")
        parts[kind] = [replace(s.shard, chunks=s.chunks[kind]) for s in states]
    spec = source.spec
    heads = Heads(spec.num_attention_heads, spec.num_query_groups, spec.kv_channels, spec.gated_linear_unit)
    tensors = {}
    for kind, cut in parts.items():
        store = merge(cut, lambda: heads)
        tensors[kind] = {name: np.array(store.read(name), np.float32) for name in store.names()}
    first = states[0]
    iteration = shards[0].iteration
    warnings = []
    if iteration is not None and iteration != first.step:
        warnings.append(
            f"iteration {iteration} with {first.step} updates: Megatron-LM counts skipped iterations, the schedule "
            "goes on from the updates"
        )
    return Found(first.step, first.group, tensors, first.scale, first.growth, warnings)


class _Rank:
    """One file's optimizer: its states by the names of the rank's own tensors."""

    def __init__(self, shard: Shard, source: Source, unfit: Callable[[Path, str], MindferryError]) -> None:
        self.shard, self._unfit = shard, unfit
        saved = load_pickled(shard.path).get("optimizer")
        if isinstance(saved, list) and len(saved) == 1:
            saved = saved[0]  # ChainedOptimizer with one member
        inner = saved.get("optimizer") if isinstance(saved, Mapping) else None
        torch_state = inner if isinstance(inner, Mapping) else saved
        if not isinstance(torch_state, Mapping) or "param_groups" not in torch_state:
            raise UsageError(
                f"{shard.path}: no optimizer state in it",
                remedy="it was saved with --no-save-optim; migrate without --optimizer-state",
                id="optimizer.kind",
            )
        if not torch_state.get("state"):
            raise UsageError(
                f"{shard.path}: parameter groups without states: the distributed optimizer keeps them elsewhere",
                remedy="write the checkpoint again without --use-distributed-optimizer",
                id="optimizer.distributed",
            )
        self._read_scale(saved)
        groups, states = torch_state["param_groups"], torch_state["state"]
        members = self._members(source)
        placed = self._placed(groups, states, members)
        self.step = self._step(groups, states)
        self.group = next((g for g in groups if g.get("wd_mult", 1.0)), groups[0])
        self.chunks: dict[str, list[Any]] = {kind: [{} for _ in shard.chunks] for kind in (*MOMENTS, MASTER)}
        for number, (chunk, name) in placed.items():
            self._take(states.get(number), number, chunk, name)
        self._masters(saved, groups, placed)
        if not any(self.chunks[MASTER]):
            del self.chunks[MASTER]

    def _read_scale(self, saved: Mapping[str, Any]) -> None:
        scaler = saved.get("grad_scaler")
        scaler = scaler if isinstance(scaler, Mapping) else {}
        self.scale = float(scaler["scale"]) if "scale" in scaler else None
        self.growth = int(scaler.get("growth_tracker", 0))

    def _members(self, source: Source) -> list[tuple[int, str]]:
        """(chunk, name) of the rank's parameters, in the order of named_parameters()."""
        found = []
        for number, chunk in enumerate(self.shard.chunks):
            for name, value in chunk.items():
                buffer = any(rule.matches(name, source.spec.num_layers) for rule in source.rules.ignored)
                # A head tied on the same stage is the embedding itself, named twice.
                twice = (
                    name == "output_layer.weight"
                    and source.spec.tie_word_embeddings
                    and "embedding.word_embeddings.weight" in chunk
                )
                if not (buffer or twice) and value.is_floating_point():
                    found.append((number, name))
        return found

    def _shape(self, member: tuple[int, str]) -> tuple[int, ...]:
        return tuple(self.shard.chunks[member[0]][member[1]].shape)

    def _placed(
        self, groups: Any, states: Mapping[int, Any], members: list[tuple[int, str]]
    ) -> dict[int, tuple[int, str]]:
        """Number of the state -> whose it is. Megatron decays tensors that are no bias and not 1-D; which of the
        two groups comes first differs from rank to rank, and shows in the shapes."""
        decayed = [m for m in members if len(self._shape(m)) >= 2 and not m[1].endswith(".bias")]
        plain = [m for m in members if m not in set(decayed)]
        placed: dict[int, tuple[int, str]] = {}
        for group in groups:
            numbers = list(group["params"])
            ranks = {
                len(states[n]["exp_avg"].shape) >= 2 for n in numbers if isinstance(states.get(n), Mapping)
            }
            own = members if ranks == {True, False} else decayed if ranks == {True} else plain
            if numbers and len(numbers) != len(own):
                raise self._unfit(
                    self.shard.path,
                    f"groups of {[len(g['params']) for g in groups]} parameters, expected [{len(decayed)}] that are "
                    f"decayed and [{len(plain)}] that are not",
                )
            if placed.keys() & set(numbers) or set(placed.values()) & set(own if numbers else ()):
                raise self._unfit(self.shard.path, "two groups hold the same parameters")
            placed.update(zip(numbers, own, strict=False))
        if len(placed) != len(members):
            left = next(m for m in members if m not in set(placed.values()))
            raise self._unfit(self.shard.path, f"no group holds {left[1]}")
        return placed

    def _step(self, groups: Any, states: Mapping[int, Any]) -> int:
        """torch keeps the count with each state, Apex's and Transformer Engine's FusedAdam with the group."""
        steps = {int(entry["step"]) for entry in states.values() if "step" in entry}
        steps = steps or {int(group["step"]) for group in groups if "step" in group and group["params"]}
        if len(steps) != 1:
            raise self._unfit(
                self.shard.path, f"parameters have made different numbers of steps: {sorted(steps)}"
            )
        return steps.pop()

    def _take(self, entry: Any, number: int, chunk: int, name: str) -> None:
        if not isinstance(entry, Mapping) or not set(MOMENTS) <= set(entry):
            raise self._unfit(self.shard.path, f"parameter {number} ({name}) has no Adam state")
        wanted = self._shape((chunk, name))
        kinds = {kind: entry[kind] for kind in MOMENTS}
        if "master_param" in entry:  # Transformer Engine's FusedAdam keeps the master with the moments
            kinds[MASTER] = entry["master_param"]
        for kind, value in kinds.items():
            if tuple(value.shape) != wanted or not value.is_floating_point():
                raise self._unfit(
                    self.shard.path,
                    f"{kind} of {name}: found shape {list(value.shape)}, expected {list(wanted)}",
                )
            self.chunks[kind][chunk][name] = value.float()
        if MASTER in kinds:
            self._check_master(chunk, name)

    def _masters(self, saved: Mapping[str, Any], groups: Any, placed: Mapping[int, tuple[int, str]]) -> None:
        """Masters of the half-precision parameters, one list a group, and the float32 parameters themselves."""
        lists = saved.get("fp32_from_fp16_params", saved.get("fp32_from_fp16"))
        if lists is None or any(self.chunks[MASTER]):
            return
        if len(lists) != len(groups):
            raise self._unfit(
                self.shard.path, f"masters for {len(lists)} parameter groups, expected {len(groups)}"
            )
        for group, masters in zip(groups, lists, strict=True):
            members = [placed[number] for number in group["params"]]
            half = [(c, n) for c, n in members if self.shard.chunks[c][n].element_size() < 4]
            if len(half) != len(masters):
                raise self._unfit(self.shard.path, f"{len(masters)} masters for {len(half)} parameters")
            for chunk, name in members:
                self.chunks[MASTER][chunk][name] = self.shard.chunks[chunk][name].float()
            for (chunk, name), value in zip(half, masters, strict=True):
                if tuple(value.shape) != self._shape((chunk, name)):
                    raise self._unfit(
                        self.shard.path,
                        f"master of {name}: found shape {list(value.shape)}, expected "
                        f"{list(self._shape((chunk, name)))}",
                    )
                self.chunks[MASTER][chunk][name] = value.float()
                self._check_master(chunk, name)

    def _check_master(self, chunk: int, name: str) -> None:
        """A master rounds to the weight it is the master of: the proof that the order is right."""
        import torch

        weight, master = self.shard.chunks[chunk][name], self.chunks[MASTER][chunk][name]
        if not torch.equal(master.to(weight.dtype), weight):
            raise self._unfit(self.shard.path, f"the float32 master of {name} does not round to the weight")
