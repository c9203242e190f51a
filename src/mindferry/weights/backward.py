"""The way back: mindformers parameters in, the source's own tensors out, by the same rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mindferry.errors import MindferryError
from mindferry.weights.dtypes import DTYPES
from mindferry.weights.rules import BoundRules, Step
from mindferry.weights.tensor_store import Shape, TensorStore, listing
from mindferry.weights.writer import Item


def backward_items(
    bound: BoundRules,
    store: TensorStore,
    *,
    name_of: Callable[[str], str] = lambda name: name,
    dtype_of: Callable[[str], str | None] = lambda name: None,
) -> tuple[list[Item], list[str]]:
    """(the source's tensors, parameters that were filled with zeros because the run has no such bias).

    Args:
        name_of: canonical source name -> name to write.
        dtype_of: canonical source name -> dtype to write; None keeps the parameter's.

    Raises:
        MindferryError: the checkpoint is not one of this model, or holds something the source cannot.
    """
    spec = bound.geometry.spec
    names = set(store.names())
    _check(bound, store, names)
    items: list[Item] = []
    filled = []
    for step in bound.steps:
        if step.rule.may_be_absent(spec):
            _check_still_neutral(step, store)
            continue
        if step.target not in names:
            filled.append(step.target)
        items += _items(step, store if step.target in names else None, name_of, dtype_of)
    return items, filled


def _items(
    step: Step,
    store: TensorStore | None,
    name_of: Callable[[str], str],
    dtype_of: Callable[[str], str | None],
) -> list[Item]:
    """One item for each source of the step; the backward transform runs once for all of them."""
    done: dict[str, np.ndarray] = {}

    def make(source: str) -> np.ndarray:
        if source not in done:
            if store is None:
                array = np.zeros(step.target_shape, np.float32)
            else:
                array = store.read(step.target)
            done.update(zip(step.sources, step.chain.backward([array]), strict=True))
        return done.pop(source)

    def release(not_finite: int) -> None:
        if not done and store is not None:
            store.release(step.target)

    result = []
    for source, shape in zip(step.sources, step.source_shapes, strict=True):
        wanted = dtype_of(source)
        found = store.dtype(step.target) if store is not None else DTYPES["float32"]
        dtype = DTYPES[wanted] if wanted is not None else found
        result.append(Item(name_of(source), shape, dtype, lambda s=source: make(s), release))  # type: ignore[misc]
    return result


def _check_still_neutral(step: Step, store: TensorStore) -> None:
    """A parameter that was made for the run must still do nothing, or the source cannot hold it."""
    value = store.read(step.target)
    neutral = 1 if step.rule.if_absent == "ones" else 0
    if np.any(value != neutral):
        raise MindferryError(
            f"{store.location(step.target)}: {step.target} was trained away from {neutral}, and the source "
            f"format has no place for it ({step.rule.because})",
            remedy="export to hf, which has it",
            id="export.no-place",
        )


def _is_bias(name: str) -> bool:
    return name.endswith(".bias")


def _check(bound: BoundRules, store: TensorStore, names: set[str]) -> None:
    wanted: Mapping[str, Shape] = {step.target: step.target_shape for step in bound.steps}
    problems = []
    missing = [name for name in wanted if name not in names and not _is_bias(name)]
    biases = [name for name in wanted if name not in names and _is_bias(name)]
    kinds = {name.rpartition(".layers.")[2].partition(".")[2] for name in biases}
    # Biases of one kind are absent in every layer or in none.
    missing += [name for name in biases if any(_same_kind(name, other, kinds) for other in names)]
    surplus = [name for name in store.names() if name not in wanted]
    misshaped = [
        f"{name} found {list(store.shape(name))}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in names and store.shape(name) != shape
    ]
    for label, found in (("missing", missing), ("surplus", surplus), ("of another shape", misshaped)):
        if found:
            problems.append(f"{len(found)} {label}: {listing(found)}")
    if problems:
        raise MindferryError(
            f"{store.location(store.names()[0]) if names else 'checkpoint'}: not a checkpoint of this model; "
            + "; ".join(problems),
            remedy="give a checkpoint of the same run",
            id="export.do-not-fit",
        )


def _same_kind(name: str, other: str, kinds: set[str]) -> bool:
    kind = name.rpartition(".layers.")[2].partition(".")[2]
    return kind in kinds and _is_bias(other) and other.rpartition(".layers.")[2].partition(".")[2] == kind
