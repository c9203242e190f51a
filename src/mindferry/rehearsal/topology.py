"""Who talks to whom: the communication groups of a strategy, as MindSpore and mindformers form them.

MindSpore puts device_num / pipeline_stages consecutive ranks into a stage. Inside a stage mindformers takes
consecutive ranks as a tensor group (tensor_parallel/utils.py: rank // tp * tp), and its device matrix is (dp, cp, tp).
This is stated here a second time, beside partition.layout, which says what each rank's checkpoint holds: the two must
agree, and `disagreements` says where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Topology:
    """Groups of ranks; a rank's place is its position in them.

    Attributes:
        tensor: ranks that share each matrix, by share.
        data: ranks that hold the same numbers, by replica.
        pipeline: ranks that hand activations on, by stage.
    """

    tensor: tuple[tuple[int, ...], ...]
    data: tuple[tuple[int, ...], ...]
    pipeline: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, data_parallel: int, model_parallel: int, pipeline_stage: int) -> Topology:
        """The groups of a strategy."""
        size = data_parallel * model_parallel
        stages = [range(stage * size, (stage + 1) * size) for stage in range(pipeline_stage)]
        return cls(
            tensor=tuple(
                tuple(stage[at : at + model_parallel])
                for stage in stages
                for at in range(0, size, model_parallel)
            ),
            data=tuple(tuple(stage[at::model_parallel]) for stage in stages for at in range(model_parallel)),
            pipeline=tuple(tuple(stage[at] for stage in stages) for at in range(size)),
        )

    @property
    def ranks(self) -> int:
        return sum(map(len, self.tensor))

    def position(self, rank: int) -> tuple[int, int, int]:
        """(stage, replica, share) of `rank`."""
        return tuple(group_of(groups, rank).index(rank) for groups in (self.pipeline, self.data, self.tensor))  # type: ignore[return-value]

    def of_rank(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The groups that `rank` is in, by what they are for; `previous` and `next` have two ranks each."""
        line = group_of(self.pipeline, rank)
        stage = line.index(rank)
        groups = {
            "world": tuple(range(self.ranks)),
            "tensor": group_of(self.tensor, rank),
            "data": group_of(self.data, rank),
        }
        if stage:
            groups["previous"] = line[stage - 1 : stage + 1]
        if stage + 1 < len(line):
            groups["next"] = line[stage : stage + 2]
        if len(line) > 1 and stage in (0, len(line) - 1):
            groups["tied"] = (line[0], line[-1])
        return groups


def group_of(groups: tuple[tuple[int, ...], ...], rank: int) -> tuple[int, ...]:
    """The one of `groups` that has `rank` in it."""
    return next(group for group in groups if rank in group)


def disagreements(topology: Topology, grid: Any) -> list[str]:
    """Ranks whose checkpoint, by `grid` (partition.layout.Grid), is another place than their groups give them."""
    found = []
    for rank in range(topology.ranks):
        acts, place = topology.position(rank), grid.place(rank)
        holds = (place.stage, place.data, place.tensor)
        if acts != holds:
            found.append(f"rank {rank}: its checkpoint is {_place(holds)}, its groups make it {_place(acts)}")
    return found


def _place(place: tuple[int, ...]) -> str:
    return "stage {}, replica {}, share {}".format(*place)
