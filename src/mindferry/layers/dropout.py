"""Dropout whose masks depend on the step alone, so that a resumed run draws the ones an unbroken run would.

MindSpore's Dropout draws from a generator inside its kernel, whose state can be neither saved nor set. Here an
element is kept when a hash of (seed, rank, layer, step, position) says so: two keys of 32 bits, of its row
and of its column, are drawn anew at every step, and the top bits of their product decide.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

# Odd constants of the keys' mixing: multiply and xor-shift rounds with full avalanche (as in integer hashes
# of the murmur family), and the golden ratio to spread consecutive numbers.
_MIX_1, _MIX_2, _SPREAD, _LAYER = 739982445, 695872825, -1640531535, 374761393


def _signed(value: int) -> int:
    """`value` modulo 2**32 as an int32."""
    return (value + 2**31) % 2**32 - 2**31


class PortableDropout(nn.Cell):
    """Dropout in training, identity otherwise. DropoutExt has no CPU kernel.

    Until `count_steps` has been called on the network it is MindSpore's own Dropout.
    """

    def __init__(self, p):
        super().__init__()
        self.p = p
        self.use_dropout = p > 0.0
        self.dropout = nn.Dropout(p=p)
        self.counted = False
        self.salt = 0
        self.scale = 1.0 / (1.0 - p)
        # A uniform int32 is above this with probability 1 - p.
        self.threshold = ms.Tensor(_signed(round(p * 2**32) + 2**31 - 1), ms.int32)
        self.xor, self.mask_bits, self.shift = ops.BitwiseXor(), ops.BitwiseAnd(), ops.RightShift()
        self.fifteen, self.low_17 = ms.Tensor([15], ms.int32), ms.Tensor([0x1FFFF], ms.int32)
        self.range = ops.Range()

    def construct(self, x):
        if not self.training or not self.use_dropout:
            return x
        if not self.counted:
            return self.dropout(x)
        return x * ops.cast(self.mask(x.shape), x.dtype)

    def mask(self, shape):
        """0 or 1 / (1 - p), float32, of the given shape."""
        columns = shape[-1]
        rows = 1
        for size in shape[:-1]:
            rows = rows * size
        row = ops.reshape(self.keys(rows, self.salt), (rows, 1))
        column = ops.reshape(self.keys(columns, self.salt + 1), (1, columns))
        kept = ops.cast(ops.greater(row * column, self.threshold), ms.float32) * self.scale
        return ops.stop_gradient(ops.reshape(kept, shape))

    def keys(self, count, salt):
        """`count` odd int32 keys of this step."""
        start = self.mixed(self.counter * _SPREAD + salt * _LAYER)
        numbers = ops.cast(self.range(0, count, 1), ms.int32)
        return self.mixed(self.mixed(numbers * _SPREAD + start)) * 2 + 1

    def mixed(self, x):
        """A permutation of the int32 numbers that changes half of the bits when one changes."""
        x = self.xor(x, self.folded(x)) * _MIX_1
        x = self.xor(x, self.folded(x)) * _MIX_2
        return self.xor(x, self.folded(x))

    def folded(self, x):
        """x >> 15 without its sign."""
        return self.mask_bits(self.shift(x, self.fifteen), self.low_17)


# The counter's name; it is no weight and no state: every step sets it.
COUNTER = "dropout_step"


def count_steps(network: nn.Cell, seed: int, rank: int = 0) -> ms.Parameter | None:
    """Have every PortableDropout of `network` draw by the counter that is returned; None where there is none.

    To be called before the network is compiled. Set the counter to another number for every forward pass.
    """
    cells = [
        cell
        for _, cell in network.cells_and_names()
        if isinstance(cell, PortableDropout) and cell.use_dropout
    ]
    if not cells:
        return None
    counter = ms.Parameter(ms.Tensor([0], ms.int32), name=COUNTER, requires_grad=False)
    for number, cell in enumerate(cells):
        cell.counter = counter
        cell.salt = _signed((seed * 65537 + rank) * 8191 + 2 * number)
        cell.counted = True
    return counter
