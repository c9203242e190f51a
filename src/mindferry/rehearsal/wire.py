"""Collectives of the rehearsal: NumPy arrays through MindSpore's AllReduce.

MindSpore 2.9's CPU backend has, outside the group of all ranks, only AllReduce with sum (AllGather and Broadcast
answer "only support mccl_world_group on CPU"). A sum with zeros from everybody else is exact, so the others are made
from it: AllGather sums into the rank's own slot, ReduceScatter keeps a slice of the sum, and a transfer between two
ranks is a sum to which the receiver adds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


class Wire:
    """The groups of one rank.

    Args:
        groups: what for -> ranks, this one among them (topology.Topology.of_rank).
        every_group: of all ranks, in one order for all: a group comes into being when its ranks meet.

    Attributes:
        bytes: what for -> bytes of the arrays handed to a collective, counted once a call as the cluster's own
            collective would take them (a gather its part, not the padded whole).
        calls: what for -> number of calls.
    """

    def __init__(
        self, rank: int, groups: Mapping[str, Sequence[int]], every_group: Iterable[Sequence[int]]
    ) -> None:
        import mindspore as ms
        from mindspore import ops

        self.rank = rank
        self.groups = {name: tuple(group) for name, group in groups.items()}
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        create(rank, every_group)
        world = self.groups["world"]
        self._reducers: dict[str, Any] = {}
        for name, group in self.groups.items():
            if len(group) > 1:
                self._reducers[name] = (
                    ops.AllReduce() if group == world else ops.AllReduce(group=_name(group))
                )
        self._tensor = ms.Tensor

    def size(self, name: str) -> int:
        return len(self.groups.get(name, (self.rank,)))

    def index(self, name: str) -> int:
        """Position of this rank in the group."""
        return self.groups[name].index(self.rank)

    def _sum(self, name: str, values: np.ndarray) -> np.ndarray:
        flat = np.ascontiguousarray(values, np.float32)
        total: np.ndarray = self._reducers[name](self._tensor(flat)).asnumpy()
        return total

    def _count(self, name: str, values: np.ndarray) -> None:
        kind = "pipeline" if name in ("previous", "next") else name
        self.bytes[kind] += values.size * 4
        self.calls[kind] += 1

    def sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """AllReduce: the sum over the group, on all of its ranks. float32."""
        if self.size(name) == 1:
            return values
        self._count(name, values)
        return self._sum(name, values)

    def gather(self, name: str, part: np.ndarray) -> np.ndarray:
        """AllGather along the first axis: [n, ...] of each rank -> [ranks * n, ...]."""
        if self.size(name) == 1:
            return part
        self._count(name, part)
        whole = np.zeros((self.size(name), *part.shape), np.float32)
        whole[self.index(name)] = part
        return self._sum(name, whole).reshape(-1, *part.shape[1:])

    def scatter_sum(self, name: str, values: np.ndarray) -> np.ndarray:
        """ReduceScatter along the first axis: [ranks * n, ...] -> the sum's [n, ...] of this rank."""
        if self.size(name) == 1:
            return values
        self._count(name, values)
        total, share = self._sum(name, values), values.shape[0] // self.size(name)
        return total[self.index(name) * share :][:share]

    def send(self, name: str, values: np.ndarray) -> None:
        """Hand `values` to the other rank of a group of two, which calls receive."""
        self._count(name, values)
        self._sum(name, values)

    def receive(self, name: str, shape: Sequence[int]) -> np.ndarray:
        """What the other rank of a group of two sends."""
        return self._sum(name, np.zeros(shape, np.float32))


_made: set[str] = set()


def _name(group: Sequence[int]) -> str:
    return "rehearsal-" + "-".join(map(str, group))


def create(rank: int, groups: Iterable[Sequence[int]]) -> None:
    """Make the groups that `rank` is in; once a process each."""
    from mindspore.communication import create_group

    for group in groups:
        name = _name(group)
        if rank in group and len(group) > 1 and name not in _made:
            create_group(name, list(group))
            _made.add(name)
