"""Where the cut model first leaves the whole one: outputs of its parts, in the order of the network.

The whole model here is the rehearsal's own, on one rank, without a cut. It must have the loss of mindformers' network;
where it has not, the strategy is not to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mindferry.findings import Finding
from mindferry.rehearsal.cells import Share
from mindferry.rehearsal.judge import TOLERANCE, relative
from mindferry.rehearsal.stage import LOGITS, Cutting, Probe, Stage, micro_batches
from mindferry.rehearsal.wire import Wire

# Sums over thousands of float32 numbers agree to this where nothing is wrong.
PART_TOLERANCE = 1e-4
Sums = tuple[float, float]


def uncut(
    cutting: Cutting,
    weights: Mapping[str, np.ndarray],
    ids: np.ndarray,
    mask: np.ndarray,
    per_token: bool,
    replicas: int,
) -> tuple[float, dict[str, Sums]]:
    """Loss of the first step, and what each part puts out for the first replica's first micro-batch.

    Args:
        ids: [micro-batches, sequences, seq_length + 1] of the step; mask [micro-batches, sequences, seq_length].
    """
    alone = {"world": (0,), "tensor": (0,), "data": (0,)}
    layers = list(range(cutting.spec.num_layers))
    stage = Stage(Share(dict(weights)), Wire(0, alone, []), cutting, layers, True, True)
    loss = sum(float(stage.forward(None, batch)[0]) for batch in micro_batches(ids, mask, per_token))
    stage.probe = Probe(open=True)
    stage.forward(None, micro_batches(ids, mask, per_token, 0, replicas)[0])
    return loss, stage.probe.seen


def uncut_finding(loss: float, reference: float) -> list[Finding]:
    """Whether the rehearsal's own whole model is mindformers'."""
    if relative(loss, reference) <= TOLERANCE:
        return []
    return [
        Finding(
            "rehearse.uncut",
            "problem",
            f"without any cut the rehearsal's loss is {loss:.7g}, mindformers' network has {reference:.7g}",
            cause="the two compute different models; this is no fault of the strategy",
            remedy="please report it with this run's run.yaml",
        )
    ]


def first_difference(
    ranks: Sequence[tuple[int, Mapping[str, Any]]], whole: Mapping[str, Sums], sequence: bool
) -> list[Finding]:
    """The first part of the network whose output is not that of the whole model.

    Args:
        ranks: (stage, what the rank measured) of the first replica, by stage and share.
        sequence: activations are shared along the sequence, so their sums add up.
    """
    for name, expected in whole.items():
        seen = [result["seen"][name] for _, result in ranks if name in result["seen"]]
        if sequence or name == LOGITS:
            seen = [tuple(map(sum, zip(*seen, strict=True)))]
        for found in seen:
            error = max(relative(a, b) for a, b in zip(found, expected, strict=True))
            if error > PART_TOLERANCE:
                return [
                    Finding(
                        "rehearse.part",
                        "problem",
                        f"{name}: the first part of the model that puts out something else: sum of squares "
                        f"{found[1]:.6g}, in the whole model {expected[1]:.6g}",
                        cause="what its parameters are cut into, or the group it sums over, does not fit it",
                    )
                ]
    return []
