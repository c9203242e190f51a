"""Gradients of data-parallel processes: met, averaged in buckets, and what that costs.

A step on several processes goes through four graphs, so that its time can be told apart on the host:
forward and backward (each process its own), meet (a few numbers; whoever comes first waits here), reduce
(the gradients), update.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import mindspore as ms
from mindspore import nn, ops

# MindSpore's own default for the fusion of AllReduce, in MiB (comm_fusion, mode "auto").
BUCKET_MIB = 64
WIRE_BYTES = {"float32": 4, "float16": 2}


def buckets(sizes, limit):
    """Cut parameters into runs of at most `limit` elements, in their order; a larger one stands alone.

    Args:
        sizes: elements of each.

    Returns:
        Lists of indices.
    """
    found: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not found or filled + size > limit:
            found.append([])
            filled = 0
        found[-1].append(index)
        filled += size
    return found


class Meet(nn.Cell):
    """Sum a step's few numbers over the processes.

    Inputs: loss total, weight total and wish to stop, each [1] float32. Output: their sums [3].
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.sum = ops.AllReduce()

    def construct(self, loss, weight, stop):
        return self.sum(ops.concat((loss, weight, stop), 0))


class ReduceBucket(nn.Cell):
    """Set the totals of one bucket to their mean over the processes.

    With dtype float16 each process' values travel in half precision, scaled by its largest so that none
    overflows, and are added in float32 (AllGather: an AllReduce would round the sum at every hop).
    bfloat16 would need no scale, but MindSpore 2.9's CPU collectives do not know it.
    """

    def __init__(self, totals, ranks, dtype):
        super().__init__(auto_prefix=False)
        self.totals, self.share, self.ranks = totals, 1.0 / ranks, ranks
        self.shapes = [total.shape for total in totals]
        self.sizes = [total.size for total in totals]
        self.half = dtype == "float16"
        self.sum, self.gather = ops.AllReduce(), ops.AllGather()

    def construct(self):
        flat = ops.concat([ops.reshape(total, (-1,)) for total in self.totals], 0)
        if self.half:
            flat = self._halves(flat)
        else:
            flat = self.sum(flat) * self.share
        done = flat[:1]
        begin = 0
        for index in range(len(self.sizes)):
            part = ops.reshape(flat[begin : begin + self.sizes[index]], self.shapes[index])
            done = ops.depend(done, ops.assign(self.totals[index], part))
            begin += self.sizes[index]
        return done

    def _halves(self, flat):
        largest = ops.reshape(ops.abs(flat).max(), (1,))
        # 2**-100 keeps a bucket of zeros from dividing by zero.
        factor = 1024.0 / ops.maximum(largest, ms.Tensor([2.0**-100], ms.float32))
        parts = self.gather(ops.cast(flat * factor, ms.float16))
        parts = ops.cast(ops.reshape(parts, (self.ranks, -1)), ms.float32)
        factors = ops.reshape(self.gather(factor), (self.ranks, 1))
        return (parts / factors).sum(0) * self.share


@dataclass
class Phases:
    """Where the time of the last step between processes went, in seconds.

    Attributes:
        compute: forward and backward of all micro-batches.
        wait: for the slowest process.
        reduce: averaging the gradients.
        reductions: how often in the step they were averaged.
        loss: this process' own mean loss; a NaN that only one process has is in the others' next step.
    """

    compute: float = 0.0
    wait: float = 0.0
    reduce: float = 0.0
    reductions: int = 0
    loss: float = 0.0


class GradientExchange:
    """What the processes of data parallelism tell each other in a step.

    Args:
        totals: gradient sums of this process; become the mean over all.
        ranks: number of processes.
        dtype, bucket_mib, each_micro_batch: see AccumulatingTrainOneStepCell.

    Attributes:
        phases: of the step that ended last.
        wants_to_stop: set before a step to have all processes stop after it.
        stop_agreed: some process wanted to, in the step that ended last.
        bytes_sent: of gradients by one process in one reduction, as handed to the collective.
    """

    def __init__(self, totals, ranks, dtype="float32", bucket_mib=BUCKET_MIB, each_micro_batch=False):
        self.meet = Meet()
        self.ranks, self.each_micro_batch = ranks, each_micro_batch
        sizes = [total.size for total in totals]
        self.reducers = [
            ReduceBucket([totals[index] for index in group], ranks, dtype)
            for group in buckets(sizes, int(bucket_mib * 2**20 / 4))
        ]
        self.bytes_sent = sum(sizes) * WIRE_BYTES[dtype]
        self.phases, self._next = Phases(), Phases()
        self.wants_to_stop = self.stop_agreed = False
        self._zero = ms.Tensor([0.0], ms.float32)
        self._since: float | None = None

    def begin(self):
        """The step begins now: its batch is there."""
        self._next, self._since = Phases(), time.perf_counter()

    def _lap(self):
        now = time.perf_counter()
        passed, self._since = now - (self._since or now), now
        return passed

    def computed(self, loss, last):
        """A micro-batch is through: average now if it is time to. `loss` [1] is what it returned."""
        loss.asnumpy()  # until then it only was asked for
        self._next.compute += self._lap()
        if self.each_micro_batch and not last:
            self.meet(self._zero, self._zero, self._zero).asnumpy()
            self._next.wait += self._lap()
            self._reduce()

    def _reduce(self):
        # The totals of earlier micro-batches are alike everywhere already; a mean leaves them as they are.
        for reducer in self.reducers:
            reducer().asnumpy()
        self._next.reduce += self._lap()
        self._next.reductions += 1

    def sums(self, loss, weight):
        """Average the totals; returns loss and weight summed over processes, and the mean weight, each [1]."""
        own, tokens = float(loss.asnumpy()[0]), float(weight.asnumpy()[0])
        self._next.loss = own / tokens if tokens else 0.0
        stop = ms.Tensor([float(self.wants_to_stop)], ms.float32)
        met = self.meet(loss * 1.0, weight * 1.0, stop).asnumpy()
        self._next.wait += self._lap()
        self.stop_agreed = bool(met[2] > 0)
        self._reduce()
        self.phases = self._next
        total = ms.Tensor(met[1:2])
        return ms.Tensor(met[0:1]), total, total / self.ranks
