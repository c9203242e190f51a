"""A parallel strategy, and how layers fall on stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Strategy:
    """One way to cut a run over devices, in mindformers' terms.

    Attributes:
        batch_size: sequences a micro-batch (runner_config.batch_size).
        micro_batch_num: micro-batches a step; mindformers takes it from parallel_config.micro_batch_num with
            a pipeline and from runner_config.gradient_accumulation_steps without.
        pp_interleave_num: virtual stages a stage.
        optimizer_shard_level: 0 off, 1 to 3 as parallel_optimizer_config.optimizer_level.
        optimizer_weight_shard_size: ranks that share optimizer states; 0 for data_parallel.
        layers: layers of each [virtual stage][stage].
        recompute: layers of each stage that are recomputed in full.
        select: recompute the selected operators of the other layers.
        vocab_size: rows of the word table, padded where the cut needs it; 0 for the model's own.
    """

    data_parallel: int = 1
    model_parallel: int = 1
    context_parallel: int = 1
    pipeline_stage: int = 1
    pp_interleave_num: int = 1
    micro_batch_num: int = 1
    batch_size: int = 1
    optimizer_shard_level: int = 0
    optimizer_weight_shard_size: int = 0
    use_seq_parallel: bool = False
    layers: tuple[tuple[int, ...], ...] = ((0,),)
    recompute: tuple[int, ...] = ()
    select: bool = False
    vocab_size: int = 0

    @property
    def devices(self) -> int:
        return self.data_parallel * self.model_parallel * self.context_parallel * self.pipeline_stage

    @property
    def global_batch(self) -> int:
        """Sequences a step, as mindformers counts them."""
        return self.batch_size * self.data_parallel * self.micro_batch_num

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.layers, strict=True)))

    @property
    def shard_ranks(self) -> int:
        """Ranks that share parameters and optimizer states: 1 without optimizer parallel."""
        if not self.optimizer_shard_level:
            return 1
        return self.optimizer_weight_shard_size or self.data_parallel

    @property
    def recompute_name(self) -> str:
        """none, select, full, or the per-stage list as mindformers takes it."""
        stages = self.layers_per_stage
        full = self.recompute or (0,) * len(stages)
        if full == stages and any(full):
            return "full"
        extra = " + select" if self.select else ""
        return f"{list(full)}{extra}" if any(full) else ("select" if self.select else "none")

    def offset(self, num_layers: int) -> Any:
        """mindformers' `offset` for `layers`: 0, one list, or one list a virtual stage."""
        base = num_layers // (self.pipeline_stage * self.pp_interleave_num)
        rows = [[n - base for n in row] for row in self.layers]
        if not any(map(any, rows)):
            return 0
        return rows if self.pp_interleave_num > 1 else rows[0]

    def label(self) -> str:
        """Short text: DP2 MP2 PP2, with the rest where it is not the default."""
        parts = [f"DP{self.data_parallel} MP{self.model_parallel} PP{self.pipeline_stage}"]
        if self.context_parallel > 1:
            parts.append(f"CP{self.context_parallel}")
        if self.pp_interleave_num > 1:
            parts.append(f"V{self.pp_interleave_num}")
        parts.append(f"batch {self.batch_size} x {self.micro_batch_num}")
        if self.optimizer_shard_level:
            size = f"/{self.optimizer_weight_shard_size}" if self.optimizer_weight_shard_size else ""
            parts.append(f"level{self.optimizer_shard_level}{size}")
        if self.use_seq_parallel:
            parts.append("SP")
        stages = [i for i, n in enumerate(self.recompute) if n]
        if self.pipeline_stage > 4 and stages and self.recompute_name != "full":
            extra = " + select" if self.select else ""
            parts.append(f"recompute {sum(self.recompute)} layers on {len(stages)} stages{extra}")
        else:
            parts.append(f"recompute {self.recompute_name}")
        return ", ".join(parts)

    def with_(self, **changes: Any) -> Strategy:
        return replace(self, **changes)


def divisors(n: int) -> list[int]:
    """Divisors of `n`, smallest first."""
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return small + [n // i for i in reversed(small) if i * i != n]


def even_layers(num_layers: int, stages: int, virtual: int = 1) -> tuple[tuple[int, ...], ...]:
    """Layers [virtual][stage] as equal as they go; what is left over goes to middle stages first.

    The first stage holds most activations and the last one the head, so neither gets an extra layer before
    the rest.
    """
    base, left = divmod(num_layers, stages * virtual)
    order = sorted(range(stages * virtual), key=lambda i: (i in (0, stages * virtual - 1), i % stages, i))
    chosen = set(order[:left])
    flat = [base + (i in chosen) for i in range(stages * virtual)]
    return tuple(tuple(flat[row * stages : (row + 1) * stages]) for row in range(virtual))


@functools.lru_cache(maxsize=4096)
def balanced_layers(
    num_layers: int, stages: int, virtual: int, first_extra: float, last_extra: float
) -> tuple[tuple[int, ...], ...]:
    """Layers [virtual][stage] that make the slowest stage as fast as whole layers allow.

    Args:
        first_extra, last_extra: work of the embedding and of the head, in layers.

    Every virtual stage keeps at least one layer.
    """
    if stages == 1:
        return even_layers(num_layers, 1, virtual)
    loads = [0.0] * stages
    loads[0] += first_extra
    loads[-1] += last_extra
    counts = [virtual] * stages
    # Each further layer to the stage that ends up lightest; later stages first, they hold fewer activations.
    for _ in range(num_layers - stages * virtual):
        pick = min(range(stages), key=lambda i: (counts[i] + loads[i], -i))
        counts[pick] += 1
    rows = [[0] * stages for _ in range(virtual)]
    for stage, count in enumerate(counts):
        base, left = divmod(count, virtual)
        for row in range(virtual):
            # The last virtual stage of the last stage carries the head: its row gets extras last.
            rows[row][stage] = base + (row < left)
    return tuple(map(tuple, rows))


def place_layers(num_layers: int, stages: int, virtual: int, offset: Any) -> list[list[int]]:
    """Layers [virtual][stage] that mindformers' LayerSetting gives each stage for `offset`, misuse included.

    It broadcasts `offset` over the virtual stages after checking its sum, so a plain number or a single row
    that passes the check can still promise more layers than there are; the last stages then get what is left.
    """
    promised = np.broadcast_to(np.asarray(offset, dtype=np.int64), (virtual, stages)) + num_layers // (
        stages * virtual
    )
    ends = np.cumsum(promised.reshape(-1))
    chunk = np.searchsorted(ends, np.arange(1, num_layers + 1))
    counts = np.bincount(np.minimum(chunk, stages * virtual - 1), minlength=stages * virtual)
    return counts.reshape(virtual, stages).tolist()


def strategy_for(
    num_layers: int, *, layers: Sequence[Sequence[int]] | None = None, **fields: Any
) -> Strategy:
    """A Strategy with even layers and no recompute unless given."""
    stages, virtual = fields.get("pipeline_stage", 1), fields.get("pp_interleave_num", 1)
    placed = tuple(map(tuple, layers)) if layers is not None else even_layers(num_layers, stages, virtual)
    fields.setdefault("recompute", (0,) * stages)
    return Strategy(layers=placed, **fields)
