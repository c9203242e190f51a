"""Step 4, the gradients: the norm over time, each layer's share, overflow and loss scale, the weights themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.diagnosis.loss.metrics import Metrics, first_break, longest_overflow
from mindferry.diagnosis.loss.step import Step
from mindferry.findings import Finding

OVERFLOWS_IN_A_ROW = 5
OVERFLOW_SHARE = 0.2
GROWTH = 30.0
HIGH_NORM = 100.0
VANISHED = 1e-4  # of the whole gradient
DEAD = 1e-7  # of what the other layers' same parameter has
LAYER_RATIO = 1e4

_LAYER = re.compile(r"^(.*?layers\.)(\d+)(\..*)$")


def examine_gradients(
    content: Mapping[str, Any],
    metrics: Metrics,
    weights: Callable[[], Mapping[str, np.ndarray]] | None = None,
    layers: Callable[[], Mapping[str, float]] | None = None,
) -> Step:
    """Judge the record, then the weights, then each layer's gradient on one batch.

    Args:
        weights: gives the newest weights by name.
        layers: gives each parameter's gradient norm (float32, one batch of the run).
    """
    step = Step("gradients")
    _overflow(step, content, metrics)
    if weights is not None:
        _not_a_number(step, weights)
    _over_time(step, metrics)
    if layers is not None and step.verdict == "good":
        try:
            norms = dict(layers())
        except Exception as err:
            step.add(
                Finding("loss.gradients.no-layers", "info", f"no gradient by layer: {type(err).__name__}")
            )
        else:
            judge_layers(step, norms)
    if not len(metrics) and step.verdict == "good":
        step.verdict = "unknown"
    if not step.summary:
        step.summary = _summary(step, metrics)
    return step


def _summary(step: Step, metrics: Metrics) -> str:
    norms = metrics.grad_norm[np.isfinite(metrics.grad_norm)]
    if not len(norms):
        return "no norms are recorded"
    return f"norm {norms[0]:.3g} to {norms[-1]:.3g}, largest {norms.max():.3g}, {int(metrics.overflow.sum())} overflows"


def _overflow(step: Step, content: Mapping[str, Any], metrics: Metrics) -> None:
    """Overflow steps in a row, or many; one now and then is what a dynamic scale is for."""
    broken = first_break(metrics)
    if broken is not None:
        step.evidence["break"] = str(broken)
        if metrics.bad_ranks:
            names = ", ".join(map(str, metrics.bad_ranks))
            step.add(
                Finding(
                    "loss.gradients.rank",
                    "problem",
                    f"{broken}: it is rank {names} whose own loss is no number first",
                    cause="the average takes every rank along in the next step",
                    remedy="look at that rank's share of the data, then at its machine",
                )
            )
    if not len(metrics):
        return
    length, start = longest_overflow(metrics)
    share = float(metrics.overflow.mean())
    scales = metrics.loss_scale[np.isfinite(metrics.loss_scale)]
    step.evidence.update(overflow_steps=int(metrics.overflow.sum()), longest_row=length)
    if len(scales):
        step.evidence["loss_scale"] = [float(scales[0]), float(scales[-1])]
    if length >= OVERFLOWS_IN_A_ROW or (share > OVERFLOW_SHARE and len(metrics) >= 10):
        fixed = len(scales) > 1 and float(scales.min()) == float(scales.max())
        floor = len(scales) > 0 and float(scales[-1]) <= 1.0
        if fixed and not floor:
            cause = (
                f"the loss scale stands at {scales[0]:g} whatever happens: scaled gradients leave the range"
            )
            remedy = "runner_wrapper.scale_sense: 1.0 with bfloat16 or float32, 1024 with float16, or a dynamic scale"
        elif floor:
            cause = "the loss scale is at its floor and the steps still overflow: the gradient itself is no number"
            remedy = (
                "look at the weights and the data before that step; use bfloat16 or float32; lower the rate"
            )
        else:
            cause = "the gradient leaves the range again and again"
            remedy = "use bfloat16 or float32, or a lower learning rate"
        step.add(
            Finding(
                "loss.gradients.overflow",
                "problem",
                f"{length} steps in a row overflow from step {start} on ({share:.0%} of all); no weight moves in them",
                cause=cause,
                remedy=remedy,
            )
        )
    elif metrics.overflow.any():
        first = int(metrics.steps[np.flatnonzero(metrics.overflow)[0]])
        step.add(
            Finding(
                "loss.gradients.single-overflow",
                "info",
                f"{int(metrics.overflow.sum())} overflow steps (the first at {first}): normal with a loss scale",
            )
        )


def _not_a_number(step: Step, weights: Callable[[], Mapping[str, np.ndarray]]) -> None:
    bad = [name for name, value in weights().items() if not np.isfinite(value).all()]
    if bad:
        step.add(
            Finding(
                "loss.gradients.weights-not-finite",
                "problem",
                f"{len(bad)} weights hold infinities or NaN, first {bad[0]}",
                cause="a step wrote them, or the checkpoint came so; every further step is lost",
                remedy="go back to the last good checkpoint, or convert the weights again",
            )
        )


def _over_time(step: Step, metrics: Metrics) -> None:
    """Explosion and vanishing in the recorded norms; a norm that is no number counts as infinite."""
    norms = np.where(np.isfinite(metrics.grad_norm), metrics.grad_norm, np.inf)
    if np.isnan(metrics.grad_norm).all() and not (~np.isfinite(metrics.loss)).any():
        return
    norms = norms[~metrics.overflow] if metrics.overflow.any() else norms
    if len(norms) < 4:
        return
    part = max(1, len(norms) // 4)
    early, late = float(np.median(norms[:part])), float(np.median(norms[-part:]))
    step.evidence["norm"] = {"early": early, "late": late, "largest": float(norms.max())}
    if early > HIGH_NORM or late > max(GROWTH * early, 10.0):
        broken = step.evidence.get("break", "")
        grown = f"from {early:.3g} to {late:.3g}" if late > early else f"{early:.3g} from the first steps on"
        step.add(
            Finding(
                "loss.gradients.exploding",
                "problem",
                f"the gradient norm is {grown}{'; ' + broken if broken else ''}",
                cause="weights or activations are too large for this depth, or each update makes them so",
                remedy="check the initial weights (init_method_std, the conversion), clip (max_grad_norm: 1.0)",
            )
        )
    elif "break" in step.evidence:
        step.add(
            Finding(
                "loss.gradients.not-finite",
                "problem",
                step.evidence["break"],
                cause="the gradient norm gave no sign before it",
                remedy="start again from the checkpoint before that step and look at its batch",
            )
        )
    elif late < 1e-6 and early < 1e-3:
        step.add(_vanishing(f"the gradient norm is {late:.2g}", ""))


def _vanishing(message: str, evidence: str) -> Finding:
    return Finding(
        "loss.gradients.vanishing",
        "problem",
        message,
        cause="the signal dies on its way back: norms near 0, weights near 0, or saturated activations",
        remedy="check the norm weights (gamma) and the scale of the initial weights against the source",
        evidence=evidence,
    )


def judge_layers(step: Step, norms: Mapping[str, float]) -> None:
    """Dead, vanishing and exploding layers from each parameter's gradient norm."""
    whole = float(np.sqrt(sum(value**2 for value in norms.values() if np.isfinite(value))))
    layers: dict[int, float] = {}
    kinds: dict[str, dict[int, float]] = {}
    for name, value in norms.items():
        match = _LAYER.match(name)
        if match is None or not name.endswith("weight"):
            continue
        number = int(match.group(2))
        layers[number] = float(np.hypot(layers.get(number, 0.0), value))
        kinds.setdefault(match.group(1) + "N" + match.group(3), {})[number] = value
    step.evidence["layers"] = {str(number): value for number, value in sorted(layers.items())}
    if not layers or not whole:
        if not whole:
            step.add(_vanishing("the gradient of one batch is 0 everywhere", ""))
        return
    if not all(np.isfinite(list(norms.values()))) or whole > HIGH_NORM * 10:
        worst = max(norms, key=lambda name: norms[name] if np.isfinite(norms[name]) else np.inf)
        step.add(
            Finding(
                "loss.gradients.exploding",
                "problem",
                f"the gradient of one batch has norm {whole:.3g}, most of it in {worst}",
                cause="weights or activations are too large for this depth",
                remedy="check the initial weights against the source (`mindferry verify`)",
            )
        )
        return
    if max(layers.values()) < VANISHED * whole:
        step.add(
            _vanishing(
                f"the layers get {max(layers.values()) / whole:.1g} of the gradient, the ends of the network the rest",
                "",
            )
        )
        return
    dead = [
        kind.replace("N", str(number), 1)
        for kind, values in kinds.items()
        for number, value in values.items()
        if value <= DEAD * max(max(values.values()), VANISHED * whole)
    ]
    if dead:
        step.add(
            Finding(
                "loss.gradients.dead-layer",
                "problem",
                f"no gradient reaches {', '.join(dead[:4])}"
                + (f" and {len(dead) - 4} more" if len(dead) > 4 else ""),
                cause="the weights around it are 0, so it never learns: a conversion left them out, or it is frozen",
                remedy="compare these weights with the source (`mindferry verify`), and migrate again",
                evidence=", ".join(dead),
            )
        )
    elif max(layers.values()) > LAYER_RATIO * min(layers.values()):
        step.add(_vanishing("the layers' gradients lie more than a factor of 10,000 apart", str(layers)))


def layer_norms(content: Mapping[str, Any], config: Any, model_dir: Path) -> dict[str, float]:
    """Each parameter's gradient norm on the first batch of the run, in float32 PyNative mode."""
    from mindferry.checking import sides

    network = sides.build_network(content, config)
    sides.load_weights(network, model_dir)
    trace = sides.run_mindspore(network, sides.first_batch(content, content["runner_config"]["batch_size"]))
    return {
        name: float(np.linalg.norm(value.astype(np.float64).reshape(-1)))
        for name, value in trace.gradients.items()
    }
