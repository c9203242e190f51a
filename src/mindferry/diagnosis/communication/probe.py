"""What the collectives of this machine cost alone: a rank's script, and the line through its times."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Elements of float32; the largest is 4 MiB, so that the probe takes a moment.
SIZES = (1, 1 << 16, 1 << 20)
_REPEATS = 15


@dataclass(frozen=True)
class Collective:
    """Seconds of an AllReduce of float32 = `latency` + bytes / `bytes_per_second`, among `workers` processes."""

    workers: int
    latency: float
    bytes_per_second: float

    def seconds(self, size: float, pieces: int = 1) -> float:
        """Of `size` bytes in `pieces` calls."""
        return pieces * self.latency + size / self.bytes_per_second


def fitted(workers: int, times: dict[int, float]) -> Collective:
    """The line through the smallest and the largest of `times` (bytes -> seconds)."""
    small, large = min(times), max(times)
    rate = (large - small) / max(times[large] - times[small], 1e-9)
    return Collective(workers, max(times[small], 1e-7), rate)


def measure(folder: Path, workers: int) -> Collective:
    """Time AllReduce among `workers` processes of this machine.

    Raises:
        MindferryError: a process failed.
    """
    from mindferry.launching.msrun import Job

    results = Job(Path(__file__), folder, workers).run({"sizes": list(SIZES)})
    # A collective is over when the slowest has it.
    times = {
        4 * size: max(float(result["seconds"][index]) for result in results)
        for index, size in enumerate(SIZES)
    }
    return fitted(workers, times)


def work(folder: Path, request: dict[str, Any], rank: int) -> dict[str, Any]:
    """As one rank: median seconds of an AllReduce for each of request["sizes"] (float32 elements)."""
    import time

    import mindspore as ms
    import numpy as np
    from mindspore import ops
    from mindspore.communication import init

    ms.set_device("CPU")
    init()
    reduce = ops.AllReduce()
    seconds = []
    for size in request["sizes"]:
        data = ms.Tensor(np.ones(size, np.float32))
        taken = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            reduce(data).asnumpy()
            taken.append(time.perf_counter() - began)
        seconds.append(float(np.median(taken[3:])))
    return {"seconds": seconds}


if __name__ == "__main__":
    from mindferry.launching.rank import main

    main(work)
