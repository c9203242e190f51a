"""Which tokens Megatron's GPTDataset shows at which sample number, computed with numpy alone.

Megatron-LM and mindformers share one rule (megatron/core/datasets/gpt_dataset.py, "document, sample, shuffle index").
With the same .bin/.idx, seed, seq_length, split and number of samples both show the same samples in the same order;
this is that rule once more, so that a migrated run can be checked against it without either of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mindferry.data.megatron import MegatronDataset
from mindferry.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Share of an epoch below which the last, partial one is shuffled by itself.
_FINAL_EPOCH = 0.80

_BLEND_SURPLUS = 1.005


def split_ranges(split: str, sequences: int) -> list[range]:
    """Sequence numbers of train, valid and test for a `split` such as "969,30,1".

    Raises:
        UsageError: no positive number in it, or more than three.
    """
    parts = [float(number) for number in re.findall(r"[.0-9]+", split)]
    if not parts or len(parts) > 3 or sum(parts) <= 0:
        raise UsageError(f"split: found {split!r}, expected up to three numbers such as '969,30,1'")
    parts += [0.0] * (3 - len(parts))
    shares = [part / sum(parts) for part in parts]
    bounds = [0]
    total = 0.0
    for share in shares:
        total += share
        bounds.append(round(total * float(sequences)))
    return [range(bounds[i], bounds[i + 1]) for i in range(3)]


class GPTSampleOrder:
    """The samples of one data set in Megatron's order.

    Args:
        data: the opened .bin/.idx.
        seq_length: tokens of a sample; each comes with one more, the label of its last.
        samples: how many are asked for; None: one epoch.
        seed: Megatron's random seed (default 1234 there).
        sequences: numbers of the sequences to draw from (`split_ranges`); None: all.
    """

    def __init__(
        self,
        data: MegatronDataset,
        seq_length: int,
        samples: int | None,
        seed: int,
        sequences: range | None = None,
    ) -> None:
        self._data, self._seq_length = data, seq_length
        chosen = np.arange(len(data.lengths)) if sequences is None else np.asarray(sequences)
        per_epoch = int(data.lengths[chosen].astype(np.int64).sum())
        if per_epoch < 2:
            raise UsageError(f"{data.bin}: fewer than two tokens in this split", id="data.too-short")
        wanted = 0 if samples is None else samples * seq_length + 1
        self.epochs = max(1, -(-wanted // per_epoch))
        state = np.random.RandomState(seed)
        before_last = ((self.epochs - 1) * per_epoch - 1) // seq_length
        alone = False
        if self.epochs > 1 and samples is not None:
            in_last = samples - before_last
            alone = in_last < int(_FINAL_EPOCH * ((per_epoch - 1) // seq_length))
        self.documents = self._shuffled_documents(chosen, state, alone)
        self.samples = (self.epochs * per_epoch - 1) // seq_length
        parts = [(0, before_last), (before_last, self.samples)] if alone else [(0, self.samples)]
        order = []
        for first, last in parts:
            numbers = np.arange(first, last, dtype=np.int64)
            state.shuffle(numbers)
            order.append(numbers)
        self.order: NDArray[np.int64] = np.concatenate(order)
        lengths = data.lengths[self.documents].astype(np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def _shuffled_documents(
        self, chosen: NDArray[np.int64], state: np.random.RandomState, alone: bool
    ) -> NDArray[np.int32]:
        """The sequences of all epochs in the order in which they are laid end to end."""
        parts = []
        for epochs in (self.epochs - 1, 1) if alone else (self.epochs,):
            part = np.tile(chosen, epochs).astype(np.int32)
            state.shuffle(part)
            parts.append(part)
        return np.concatenate(parts)

    def __len__(self) -> int:
        return self.samples

    def tokens(self, number: int) -> NDArray[np.int64]:
        """The seq_length + 1 tokens of sample `number` of training."""
        begin = int(self.order[number]) * self._seq_length
        end = begin + self._seq_length + 1
        at = int(np.searchsorted(self._starts, begin, side="right")) - 1
        parts = []
        while begin < end:
            ids = self._data.sequence(int(self.documents[at]))
            inside = begin - int(self._starts[at])
            part = ids[inside : inside + end - begin]
            parts.append(part.astype(np.int64))
            begin, at = begin + len(part), at + 1
        return np.concatenate(parts)


def blend_order(
    weights: Sequence[float], size: int
) -> tuple[NDArray[np.int16], NDArray[np.int64], list[int]]:
    """How a blend of `size` samples mixes data sets: (data set of each sample, sample number in it, samples of each).

    Each sample comes from the data set that lags furthest behind its share. mindformers 1.9.0 builds half a
    percent more of each data set than asked for, and the blend is as long as these together.

    Raises:
        UsageError: a weight that is not positive.
    """
    if not weights or any(not 0 < weight < math.inf for weight in weights):
        raise UsageError(f"weights: found {list(weights)}, expected positive numbers")
    shares = np.asarray(weights, dtype=np.float64) / np.sum(np.asarray(weights, dtype=np.float64))
    built = [math.ceil(size * share * _BLEND_SURPLUS) for share in shares.tolist()]
    total = sum(built)
    taken = np.zeros(len(shares), dtype=np.int64)
    which = np.empty(total, dtype=np.int16)
    number = np.empty(total, dtype=np.int64)
    for k in range(total):
        lag = int(np.argmax(shares * max(float(k), 1.0) - taken))
        which[k], number[k] = lag, taken[lag]
        taken[lag] += 1
    return which, number, built
