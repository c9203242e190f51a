"""The order of a pipeline's work: complete, bounded in memory, free of deadlock when a transfer takes both sides."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mindferry.partition.layout import Grid
from mindferry.rehearsal import schedule
from mindferry.rehearsal.topology import Topology, disagreements

PIPELINES = {"stages": st.integers(1, 9), "micro_batches": st.integers(1, 12)}


@given(**PIPELINES)
def test_each_micro_batch_once_in_order(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        done = list(schedule.actions(stage, stages, micro_batches))
        for kind in (schedule.FORWARD, schedule.BACKWARD):
            assert [m for action, m in done if action == kind] == list(range(micro_batches))
        assert len(set(done)) == len(done)


@given(**PIPELINES)
def test_a_stage_holds_no_more_than_1f1b_needs(stages: int, micro_batches: int) -> None:
    """Stage s of p holds at most p - s micro-batches (arXiv 2104.04473, section 2.2.1)."""
    for stage in range(stages):
        held = highest = 0
        for action, _ in schedule.actions(stage, stages, micro_batches):
            held += {schedule.FORWARD: 1, schedule.BACKWARD: -1}.get(action, 0)
            highest = max(highest, held)
        assert highest == min(stages - stage, micro_batches)


def transfer(stage: int, action: tuple[str, int]) -> tuple[tuple[int, int], str, int] | None:
    """(pair of stages, direction, micro-batch) of an action; None for computation."""
    kind, m = action
    if kind in (schedule.SEND, schedule.RETURN):
        return (stage, stage + 1), "down" if kind == schedule.SEND else "up", m
    if kind in (schedule.RECEIVE, schedule.SEND_BACK):
        return (stage - 1, stage), "down" if kind == schedule.RECEIVE else "up", m
    return None


@given(**PIPELINES)
def test_no_deadlock_when_a_transfer_waits_for_both_sides(stages: int, micro_batches: int) -> None:
    left = [list(schedule.actions(stage, stages, micro_batches)) for stage in range(stages)]
    while any(left):
        moved = False
        for stage, todo in enumerate(left):
            while todo and transfer(stage, todo[0]) is None:
                todo.pop(0)
                moved = True
        for one, other in itertools.pairwise(range(stages)):
            if left[one] and left[other]:
                here, there = transfer(one, left[one][0]), transfer(other, left[other][0])
                if here is not None and there is not None and here[0] == there[0]:
                    assert here == there, "two neighbours come to their transfers in different orders"
                    left[one].pop(0)
                    left[other].pop(0)
                    moved = True
        assert moved, f"every stage waits: {[todo[:1] for todo in left]}"


@given(dp=st.integers(1, 5), mp=st.integers(1, 5), pp=st.integers(1, 5))
def test_groups_and_checkpoints_agree_on_every_place(dp: int, mp: int, pp: int) -> None:
    """Two statements of one layout: consecutive ranks (topology) and the formula of the checkpoints (Grid)."""
    topology, grid = Topology.of(dp, mp, pp), Grid(dp, mp, pp)
    assert disagreements(topology, grid) == []
    assert sorted(map(list, topology.tensor)) == sorted(grid.tensor_groups())
    assert sorted(map(list, topology.data)) == sorted(grid.data_groups())
    assert sorted(map(list, topology.pipeline)) == sorted(grid.pipeline_groups())
    for rank in range(topology.ranks):
        assert all(rank in group for group in topology.of_rank(rank).values())
