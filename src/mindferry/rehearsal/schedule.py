"""The one-forward-one-backward schedule, with its transfers in an order that cannot deadlock.

A transfer takes both sides at once (an AllReduce in a group of two ranks), so two neighbours must come to their
common transfers in the same order. In the steady state a stage therefore takes the gradient of an old micro-batch
before it hands on the activations of a new one; the next stage does them in that order, too.
Megatron-LM does both in one call (send_forward_recv_backward, arXiv 2104.04473, figure 4).
"""

from __future__ import annotations

from collections.abc import Iterator

FORWARD, BACKWARD = "forward", "backward"
RECEIVE, RETURN = "receive activations", "receive gradient"
SEND, SEND_BACK = "send activations", "send gradient"
Action = tuple[str, int]


def warm_up(stage: int, stages: int, micro_batches: int) -> int:
    """Forwards of `stage` before its first backward; one more micro-batch is the most that it holds."""
    return min(stages - 1 - stage, micro_batches)


def actions(stage: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """What `stage` does in a step: (action, micro-batch)."""
    first, last = stage == 0, stage == stages - 1
    warm = warm_up(stage, stages, micro_batches)
    for number in range(warm):
        yield from _enter(number, first)
        yield (SEND, number)
    for number in range(micro_batches - warm):
        yield from _enter(warm + number, first)
        if not last:
            yield (RETURN, number)
            yield (SEND, warm + number)
        yield from _leave(number, first)
    for number in range(micro_batches - warm, micro_batches):
        yield (RETURN, number)
        yield from _leave(number, first)


def _enter(number: int, first: bool) -> Iterator[Action]:
    if not first:
        yield (RECEIVE, number)
    yield (FORWARD, number)


def _leave(number: int, first: bool) -> Iterator[Action]:
    yield (BACKWARD, number)
    if not first:
        yield (SEND_BACK, number)
