"""Holds what the ranks computed against one process, and says what is wrong in the strategy's own words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindferry.findings import Finding
from mindferry.partition.layout import Grid
from mindferry.partition.rules import Cut
from mindferry.rehearsal.reference import Reference

TOLERANCE = 1e-5
_NUMBER = re.compile(r"\.layers\.\d+\.")


@dataclass(frozen=True)
class KindError:
    """The worst of a kind of parameter over layers and steps.

    Attributes:
        kind: parameter name with `*` for the layer number.
        error: largest difference of an element, in units of the largest element of one process' gradient.
        ratio: how many times one process' gradient the ranks' is, by least squares.
        worst: name of the parameter and step (from 1) it was found in.
    """

    kind: str
    error: float
    ratio: float
    worst: str

    @property
    def good(self) -> bool:
        return self.error <= TOLERANCE


def kind_of(name: str) -> str:
    return _NUMBER.sub(".layers.*.", name)


def relative(found: float, expected: float) -> float:
    """Difference in units of `expected`; infinite where `found` is no number."""
    error = abs(found - expected) / max(abs(expected), 1e-12)
    return error if np.isfinite(error) else float("inf")


def merged(
    name: str, cut: Cut, holders: Iterable[int], grid: Grid, shares: Mapping[int, Mapping[str, np.ndarray]]
) -> tuple[np.ndarray, bool]:
    """The whole of parameter `name` from the shares of the first replica, and whether all copies of it are alike.

    Args:
        holders: stages that hold it.
        shares: rank -> name -> array.
    """
    whole: np.ndarray | None = None
    alike = True
    for stage in holders:
        copy = np.zeros(cut.shape, np.float32)
        for tensor in range(grid.model_parallel):
            share = shares[grid.rank(stage, 0, tensor)][name]
            if cut.dim is None and tensor:
                alike &= np.array_equal(copy, share)
                continue
            cut.put(copy, share, tensor)
        if whole is None:
            whole = copy
        alike &= np.array_equal(whole, copy)
    assert whole is not None
    return whole, alike


def gradient_errors(
    merged_steps: Sequence[Mapping[str, np.ndarray]], reference: Sequence[Mapping[str, np.ndarray]]
) -> list[KindError]:
    """One row a kind, in the order of the network; both sides have the same names."""
    worst: dict[str, KindError] = {}
    for step, (ours, theirs) in enumerate(zip(merged_steps, reference, strict=True), 1):
        for name, expected in theirs.items():
            found = ours[name]
            scale = max(float(np.abs(expected).max()), 1e-12)
            error = float(np.abs(found - expected).max()) / scale
            error = error if np.isfinite(error) else float("inf")
            squares = float(np.square(expected, dtype=np.float64).sum())
            ratio = float((found.astype(np.float64) * expected).sum() / squares) if squares else 1.0
            kind = kind_of(name)
            if kind not in worst or error > worst[kind].error:
                worst[kind] = KindError(kind, error, ratio, f"{name}, step {step}")
    return list(worst.values())


def losses(results: Sequence[Mapping[str, Any]], reference: Reference) -> tuple[float, float, list[Finding]]:
    """Worst relative error of loss and gradient norm, and what to say about them."""
    first = results[0]
    loss = max(relative(a, b) for a, b in zip(first["losses"], reference.losses, strict=True))
    norm = max(relative(a, b) for a, b in zip(first["grad_norms"], reference.grad_norms, strict=True))
    found = []
    for key, what, error, ours, theirs in (
        ("loss", "loss", loss, first["losses"], reference.losses),
        ("grad-norm", "norm of the gradient", norm, first["grad_norms"], reference.grad_norms),
    ):
        if error <= TOLERANCE:
            continue
        step = next(
            i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if relative(a, b) > TOLERANCE
        )
        found.append(
            Finding(
                f"rehearse.{key}",
                "problem",
                f"step {step + 1}: the {what} of the cut model is {ours[step]:.7g}, of one process {theirs[step]:.7g} "
                f"({error:.1e} apart at most, expected at most {TOLERANCE:g})",
                cause="the cut model is another model; the first parameter named here is where to look",
            )
        )
    return loss, norm, found


def gradient_findings(errors: Sequence[KindError], grid: Grid, micro_batches: int) -> list[Finding]:
    """One finding a bad kind, the first five of them."""
    bad = [row for row in errors if not row.good]
    found = [
        Finding(
            "rehearse.gradient",
            "problem",
            f"{row.worst}: gradient off by {row.error:.1e} of its largest element, expected at most {TOLERANCE:g}",
            cause=_explain(row.ratio, grid, micro_batches),
            remedy="compare its line in partition/rules.py with the layer that computes with it",
        )
        for row in bad[:5]
    ]
    if len(bad) > 5:
        found.append(
            Finding("rehearse.gradient", "problem", f"{len(bad) - 5} more kinds of parameters differ")
        )
    return found


def _explain(ratio: float, grid: Grid, micro_batches: int) -> str:
    """What a gradient that is a plain multiple of the right one says."""
    degrees = {
        "model_parallel": grid.model_parallel,
        "data_parallel": grid.data_parallel,
        "pipeline_stage": grid.pipeline_stage,
        "micro-batches": micro_batches,
    }
    often = [f"{name} is {n}" for name, n in degrees.items() if n > 1 and abs(ratio / n - 1) < 1e-3]
    seldom = [f"{name} is {n}" for name, n in degrees.items() if n > 1 and abs(ratio * n - 1) < 1e-3]
    if often:
        return (
            f"it is {ratio:.4g} times the right one, and {', '.join(often)}: summed where it is whole already"
        )
    if seldom:
        return f"it is {ratio:.4g} times the right one, and {', '.join(seldom)}: a sum over them is missing"
    return ""


def replicas(results: Sequence[Mapping[str, Any]], topology_data: Iterable[Sequence[int]]) -> list[Finding]:
    """Ranks of a data group must end with the same weights, bit for bit."""
    found = []
    for group in topology_data:
        digests = {results[rank]["digest"] for rank in group}
        if len(digests) > 1:
            found.append(
                Finding(
                    "rehearse.replicas",
                    "problem",
                    f"ranks {list(group)} are replicas and end with different weights",
                    cause="their gradients were not averaged over the same group",
                )
            )
    return found


def meetings(
    results: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Sequence[int]]]
) -> list[Finding]:
    """Who answered in a communication group, against who should have."""
    found = []
    for rank, (result, groups) in enumerate(zip(results, expected, strict=True)):
        for name, present in result["met"].items():
            if sorted(groups[name]) != sorted(present):
                found.append(
                    Finding(
                        "rehearse.group",
                        "problem",
                        f"rank {rank}: its {name} group is {present}, expected {list(groups[name])}",
                    )
                )
    return found
