"""verify: do source and target compute the same numbers, and if not, where do they part first?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.checking import sides
from mindferry.checking.sides import Trace

# Aligned means all of these (fp32).
LOGITS_TOLERANCE = 1e-5  # times max(1, max |logit|)
LOSS_TOLERANCE = 1e-6  # times max(1, loss): two units in the last place of fp32 near 10 are 2e-6
GRADIENT_TOLERANCE = 1e-4  # of the parameter's gradient norm
LAYER_TOLERANCE = 1e-5  # times max(1, max |activation|)
# A gradient far below the whole one is rounding noise: exact arithmetic gives 0 for a key's bias.
GRADIENT_FLOOR = 1e-5


@dataclass(frozen=True)
class Row:
    """One compared quantity: differences, and whether they are within tolerance."""

    name: str
    max_abs_diff: float
    max_rel_diff: float
    good: bool


@dataclass(frozen=True)
class Alignment:
    """The verdict on one batch.

    Attributes:
        layers: activations in forward order, logits last.
        gradients: one row per parameter; max_rel_diff is |difference| / |gradient| in the 2-norm.
        first_divergence: the first activation, else loss, else parameter out of tolerance; None when aligned.
    """

    layers: list[Row]
    gradients: list[Row]
    loss_source: float
    loss_target: float
    first_divergence: str | None

    @property
    def aligned(self) -> bool:
        return self.first_divergence is None

    @property
    def logits_max_abs_diff(self) -> float:
        return self.layers[-1].max_abs_diff

    @property
    def loss_abs_diff(self) -> float:
        return abs(self.loss_source - self.loss_target)

    @property
    def grad_max_rel_diff(self) -> float:
        return max((row.max_rel_diff for row in self.gradients), default=0.0)


def _compare(name: str, source: np.ndarray, target: np.ndarray, tolerance: float) -> Row:
    if source.shape != target.shape:
        return Row(name, float("inf"), float("inf"), False)
    diff = float(np.max(np.abs(source.astype(np.float64) - target), initial=0.0))
    scale = max(1.0, float(np.max(np.abs(source), initial=0.0)))
    # `not (diff <= ...)` so that NaN on either side is a failure
    return Row(name, diff, diff / scale, bool(diff <= tolerance * scale))


def _gradient_rows(source: Mapping[str, np.ndarray], target: Mapping[str, np.ndarray]) -> list[Row]:
    whole = float(np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in source.values())))
    rows = []
    for name in [*source, *(n for n in target if n not in source)]:
        if name not in source or name not in target or source[name].shape != target[name].shape:
            rows.append(Row(name, float("inf"), float("inf"), False))
            continue
        a, b = source[name].astype(np.float64), target[name].astype(np.float64)
        diff = float(np.linalg.norm(a - b))
        relative = diff / max(float(np.linalg.norm(a)), GRADIENT_FLOOR * whole, 1e-30)
        rows.append(
            Row(name, float(np.max(np.abs(a - b), initial=0.0)), relative, relative <= GRADIENT_TOLERANCE)
        )
    return rows


def compare(source: Trace, target: Trace) -> Alignment:
    """Compare two traces of the same batch."""
    layers = [
        _compare(name, value, target.activations.get(name, np.zeros(0)), LAYER_TOLERANCE)
        for name, value in source.activations.items()
    ]
    layers.append(_compare("logits", source.logits, target.logits, LOGITS_TOLERANCE))
    gradients = _gradient_rows(source.gradients, target.gradients)
    loss_good = abs(source.loss - target.loss) <= LOSS_TOLERANCE * max(1.0, abs(source.loss))
    first = _first_bad(layers) or (None if loss_good else "loss") or _first_bad(gradients)
    return Alignment(layers, gradients, source.loss, target.loss, first)


def _first_bad(rows: Iterable[Row]) -> str | None:
    return next((row.name for row in rows if not row.good), None)


def align(run: Any, source_path: Path, batch_size: int = 2, opened: sides.Opened | None = None) -> Alignment:
    """Run both sides on the first rows of the run's data and compare.

    Args:
        opened: the source at `source_path`, where it has been opened before.

    Raises:
        UsageError: PyTorch is missing, or the paths are no run and no source.
        MindferryError: the weights of the run do not fit its run.yaml, or the pair cannot be compared.
    """
    from mindferry.training import engine

    overrides = {**sides.no_dropout(), "context.mode": 1, "context.enable_graph_kernel": False}
    content = engine.prepare(run, engine.Options(overrides=overrides))
    with sides.opened(run, source_path, opened) as pair:
        sides.check_pair(pair.source, content, run)
        config = engine.set_up(content, run)
        batch = sides.first_batch(content, batch_size)
        theirs = sides.run_torch(sides.load_torch_model(pair.runnable), pair.runnable.source, batch)
    network = sides.build_network(content, config)
    sides.load_weights(network, Path(content["load_checkpoint"]))
    ours = sides.run_mindspore(network, batch)
    return compare(theirs, ours)
