"""Failures in several processes: this file is what msrun starts (python ranks.py NAME)."""

from __future__ import annotations

import sys
import time

import mindspore as ms
import numpy as np
from mindspore import nn, ops


class Reduce(nn.Cell):
    def __init__(self, operator):
        super().__init__()
        self.operator = operator

    def construct(self, x):
        return self.operator(x)


def start() -> int:
    from mindspore.communication import get_rank, init

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    return get_rank()


def one_rank_fails() -> None:
    rank = start()
    x = ms.Tensor(np.ones((2, 3)), ms.float32)
    Reduce(ops.AllReduce())(x).asnumpy()
    if rank == 1:
        raise ValueError("records of this rank hold 15 tokens, expected 16")
    for _ in range(3):
        Reduce(ops.AllReduce())(x).asnumpy()
    time.sleep(3)


def one_rank_shape() -> None:
    rank = start()
    width = 3 if rank == 0 else 4
    ops.MatMul()(ms.Tensor(np.ones((2, 3)), ms.float32), ms.Tensor(np.ones((width, 2)), ms.float32)).asnumpy()
    Reduce(ops.AllReduce())(ms.Tensor(np.ones((2, 3)), ms.float32)).asnumpy()
    time.sleep(3)


def reduce_scatter() -> None:
    start()
    Reduce(ops.ReduceScatter())(ms.Tensor(np.ones((4, 3)), ms.float32)).asnumpy()


def send_receive() -> None:
    rank = start()
    if rank == 0:
        Reduce(ops.Send(sr_tag=0, dest_rank=1))(ms.Tensor(np.ones((4, 3)), ms.float32))
    else:
        Reduce(ops.Receive(sr_tag=0, src_rank=0, shape=[4, 3], dtype=ms.float32))(ms.Tensor(1.0))


def killed() -> None:
    import os
    import signal

    rank = start()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3)
    Reduce(ops.AllReduce())(ms.Tensor(np.ones((4, 3)), ms.float32)).asnumpy()


def parallel_product() -> None:
    """DP 2 x TP 2 on two processes."""
    from diagnosis.produce.engine_runs import use_parallel_alone

    use_parallel_alone()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
