"""A checked `Layout` as a `Strategy`, so that its memory and time can be estimated."""

from __future__ import annotations

from typing import Any

from mindferry.planning.layout import Layout
from mindferry.planning.strategy import Strategy, place_layers


def strategy_of(x: Layout) -> Strategy:
    """The strategy a layout amounts to, with the resets mindformers applies. Call it only on a layout
    without problems."""
    semi = x.semi_auto
    p = x.pipeline_stage if semi else 1
    v = x.virtual if semi else 1
    layers = place_layers(x.num_layers, p, v, x.offset if p * v > 1 else 0)
    size = x.parallel_optimizer_config.get("optimizer_weight_shard_size", -1)
    d = x.data_parallel if semi else x.devices
    return Strategy(
        data_parallel=d,
        model_parallel=x.model_parallel if semi else 1,
        context_parallel=x.context_parallel if semi else 1,
        pipeline_stage=p,
        pp_interleave_num=v,
        micro_batch_num=x.micro_batches,
        batch_size=x.batch_size * (x.micro_batch_interleave_num if semi else 1),
        optimizer_shard_level=x.optimizer_shard_level if d > 1 else 0,
        optimizer_weight_shard_size=0
        if not 0 < size < d or d % size or not x.optimizer_shard_level
        else int(size),
        use_seq_parallel=bool(x.use_seq_parallel) and semi,
        layers=tuple(map(tuple, layers)),
        recompute=_full_layers(x.recompute, layers),
        select=_selects(x),
        vocab_size=x.vocab_size,
    )


def _selects(x: Layout) -> bool:
    """Whether select_recompute reaches any operator; True alone means patterns that only gated MLPs have."""
    value = x.select_recompute
    if value is True:
        return x.gated_linear_unit or x.use_legacy
    return bool(value)


def _full_layers(value: Any, layers: list[list[int]]) -> tuple[int, ...]:
    """Layers of each stage recomputed in full, as LayerSetting reads `recompute`."""
    totals = [sum(column) for column in zip(*layers, strict=True)]
    if isinstance(value, bool) or not isinstance(value, (list, tuple)):
        return tuple(totals) if value else (0,) * len(totals)
    if all(isinstance(item, (int, bool)) for item in value):
        wanted = [10**9 if item is True else int(item) for item in value] + [0] * len(totals)
        return tuple(min(n, total) for n, total in zip(wanted, totals, strict=False))
    full = [0] * len(totals)
    for row, counts in zip(value, layers, strict=False):
        for stage, count in enumerate(counts):
            item = row if isinstance(row, bool) else (row[stage] if stage < len(row) else 0)
            full[stage] += count if item is True else min(int(item), count)
    return tuple(full)
