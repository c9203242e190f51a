"""Seconds of collectives and of messages between pipeline stages."""

from __future__ import annotations

import math

from mindferry.planning.settings import Device
from mindferry.planning.strategy import Strategy


def collective_seconds(kind: str, size: float, ranks: int, stride: int, device: Device) -> float:
    """Seconds of a ring `all_reduce` or `all_gather` (reduce-scatter alike) of `size` bytes.

    Args:
        size: bytes of the whole tensor on one rank (after the gather, for all_gather).
        ranks: ranks in the group.
        stride: distance of neighbours in rank numbers; mindformers lays model parallel innermost.

    A group that spans hosts goes inside a host first, then between hosts on the part each rank then owns.
    """
    if ranks <= 1 or size <= 0:
        return 0.0
    inside = min(ranks, max(1, device.devices_per_host // max(1, stride)))
    while ranks % inside:
        inside -= 1
    outside = ranks // inside
    factor = 2 if kind == "all_reduce" else 1
    seconds = 0.0
    if inside > 1:
        beta = device.bandwidth(True)
        seconds += factor * ((inside - 1) * device.intra_host_latency + (inside - 1) / inside * size / beta)
    if outside > 1:
        beta = device.bandwidth(False)
        part = size / inside
        # Rings of hundreds of hosts are run as trees: latency grows with the logarithm beyond 16.
        hops = outside - 1 if outside <= 16 else 15 + math.log2(outside / 16) * 4
        seconds += factor * (hops * device.inter_host_latency + (outside - 1) / outside * part / beta)
    return seconds


def hop_seconds(st: Strategy, size: float, device: Device) -> float:
    if st.pipeline_stage == 1:
        return 0.0
    inside = st.devices <= device.devices_per_host
    latency = device.intra_host_latency if inside else device.inter_host_latency
    return latency * st.pp_interleave_num + size / device.bandwidth(inside)
