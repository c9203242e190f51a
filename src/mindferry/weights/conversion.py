"""Runs a plan: source tensors in, a mindformers checkpoint out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.weights.dtypes import DTYPES, count_not_finite
from mindferry.weights.rules import Plan, Step, make_plan
from mindferry.weights.tensor_store import TensorStore
from mindferry.weights.writer import Item, write_checkpoint

if TYPE_CHECKING:
    from mindferry.sources import Source

MAX_SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True)
class UsedTensor:
    """One source tensor and the parameter it went into (several rows where tensors are fused)."""

    source: str
    target: str
    transform: str
    source_shape: list[int]
    target_shape: list[int]
    source_dtype: str
    dtype: str
    sha256: str


@dataclass
class WeightsReport:
    """What became of every tensor.

    Attributes:
        used: one row for each source tensor; `sha256` is that of the target's bytes as written.
        ignored: {source, reason}.
        created: {target, how, reason, sha256} for parameters the source does not have.
        warnings: e.g. tensors with NaN or infinity.
    """

    used: list[UsedTensor] = field(default_factory=list)
    ignored: list[dict[str, str]] = field(default_factory=list)
    created: list[dict[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain tables, as migration.json keeps them."""
        return asdict(self)


def convert(
    source: Source,
    out_dir: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: str | None = "float32",
    progress: Callable[[int, str], None] | None = None,
) -> WeightsReport:
    """Write the weights of `source` into `out_dir` under mindformers' parameter names.

    Args:
        out_dir: gets model.safetensors, or shards and model.safetensors.index.json; made if missing.
        dtype: element type of the result; None keeps each tensor's own.
        progress: called with (bytes written, parameter name) after each parameter.

    Raises:
        MindferryError: source and rules do not fit each other, or nothing can be written. Nothing is left
            behind in that case.
        UsageError: unknown dtype or shard size.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", id="weights.dtype")
    if max_shard_bytes <= 0:
        raise UsageError(f"max_shard_bytes {max_shard_bytes} is not positive", id="weights.shard-size")
    bound = source.rules
    plan = make_plan(bound, source.tensors, source.key_of)
    report = WeightsReport()
    items = [_item(step, source.tensors, dtype, report.warnings) for step in _in_order(plan, source)]
    digests = write_checkpoint(
        items, out_dir, max_shard_bytes=max_shard_bytes, metadata={"format": "np"}, progress=progress
    )
    dtypes = {item.name: item.dtype.name for item in items}
    for step in plan.used:
        for name in step.sources:
            report.used.append(
                UsedTensor(
                    source=source.original(name),
                    target=step.target,
                    transform=step.transform,
                    source_shape=list(source.tensors.shape(name)),
                    target_shape=list(step.target_shape),
                    source_dtype=source.tensors.dtype(name).name,
                    dtype=dtypes[step.target],
                    sha256=digests[step.target],
                )
            )
    for step in plan.created:
        how, why = step.rule.if_absent or "", step.rule.because
        report.created.append(
            {"target": step.target, "how": how, "reason": why, "sha256": digests[step.target]}
        )
    report.ignored = [
        {"source": source.original(name), "reason": reason} for name, reason in plan.ignored.items()
    ]
    return report


def _in_order(plan: Plan, source: Source) -> list[Step]:
    """The steps of the plan in network order."""
    place = {step.target: number for number, step in enumerate(source.rules.steps)}
    return sorted(plan.steps, key=lambda step: place[step.target])


def _item(step: Step, store: TensorStore, dtype: str | None, warnings: list[str]) -> Item:
    if dtype is not None:
        wanted = DTYPES[dtype]
    else:
        kinds = {store.dtype(name) for name in step.sources} or {DTYPES["float32"]}
        if len(kinds) > 1:
            raise MindferryError(
                f"{', '.join(step.sources)}: different types ({', '.join(sorted(k.name for k in kinds))}) "
                "cannot share one parameter",
                remedy="name the dtype of the result",
                id="weights.mixed-dtypes",
            )
        wanted = kinds.pop()

    def make() -> np.ndarray:
        if not step.sources:
            return np.full(step.target_shape, 1 if step.rule.if_absent == "ones" else 0, wanted)
        return step.chain.forward([store.read(name) for name in step.sources])[0]

    def done(not_finite: int) -> None:
        if not_finite:
            _note_not_finite(step, store, not_finite, wanted, warnings)
        # Only now: where nothing had to change, what was written is the mapped file itself.
        for name in step.sources:
            store.release(name)

    return Item(step.target, step.target_shape, wanted, make, done)


def _note_not_finite(
    step: Step, store: TensorStore, bad: int, dtype: np.dtype[Any], warnings: list[str]
) -> None:
    """Say which source tensor NaNs and infinities come from, or that the new type is too narrow."""
    in_source = False
    for name in step.sources:
        array = np.ascontiguousarray(store.read(name))
        count = count_not_finite(array)
        if count:
            in_source = True
            warnings.append(f"{name}: {count} of {array.size} values are NaN or infinite")
    if not in_source:
        size = int(np.prod(step.target_shape))
        warnings.append(f"{step.target}: {bad} of {size} values do not fit into {dtype.name}")
