"""Rows of seq_length tokens from documents: packed one after the other, or each document padded by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mindferry.data.megatron import MegatronDataset

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CHUNK = 1 << 20


class Row(NamedTuple):
    """int32 [seq_length] each; labels are inputs moved on by one, loss_mask is 1 where the label counts."""

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    loss_mask: NDArray[np.int32]


class Plan(NamedTuple):
    """How many rows there will be, and what they leave out or add."""

    rows: int
    leftover_tokens: int
    padding_tokens: int


def windows(tokens: int, seq_length: int) -> tuple[int, int]:
    """(rows, leftover) of a stream of `tokens`: windows of seq_length + 1 at a stride of seq_length.

    Neighbouring windows share one token, the label of the one and the first input of the next, so that every
    adjacent pair is trained once. `leftover` tokens at the end belong to no window.
    """
    rows = max(0, (tokens - 1) // seq_length)
    return rows, tokens - (rows * seq_length + 1) if rows else tokens


def plan(data: MegatronDataset, seq_length: int, packing: str) -> Plan:
    """What `rows` will give."""
    if packing == "pack":
        return Plan(*windows(data.tokens, seq_length), 0)
    rows = leftover = labels = 0
    for lengths in _document_lengths(data):
        rows += int(np.sum((np.maximum(lengths - 1, 0) + seq_length - 1) // seq_length))
        leftover += int(np.sum(lengths == 1))
        labels += int(np.sum(np.maximum(lengths - 1, 0)))
    return Plan(rows, leftover, rows * seq_length - labels)


def _document_lengths(data: MegatronDataset) -> Iterator[NDArray[np.int64]]:
    """Tokens of each document, a chunk of documents at a time."""
    bounds = data.documents
    for start in range(0, data.num_documents, _CHUNK):
        part = bounds[start : start + _CHUNK + 1]
        lengths = data.lengths[int(part[0]) : int(part[-1])]
        sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        yield np.diff(sums[part - part[0]])


def rows(data: MegatronDataset, seq_length: int, packing: str, pad_token_id: int) -> Iterator[Row]:
    """The rows of a data set: "pack" joins documents (`windows`), "pad" cuts each one and fills its last row.

    Padding is `pad_token_id` in inputs and labels, with loss_mask 0.
    """
    if packing == "pack":
        yield from _packed(data.stream(), seq_length)
    else:
        for ids in data.iter_documents():
            yield from _padded(ids, seq_length, pad_token_id)


def _packed(stream: NDArray[Any], seq_length: int) -> Iterator[Row]:
    ones = np.ones(seq_length, dtype=np.int32)
    for row in range(windows(len(stream), seq_length)[0]):
        window = stream[row * seq_length : (row + 1) * seq_length + 1].astype(np.int32)
        yield Row(window[:-1], window[1:], ones)


def _padded(ids: NDArray[np.int64], seq_length: int, pad_token_id: int) -> Iterator[Row]:
    for start in range(0, len(ids) - 1, seq_length):
        window = ids[start : start + seq_length + 1].astype(np.int32)
        real = len(window) - 1
        full = np.full(seq_length + 1, pad_token_id, dtype=np.int32)
        full[: real + 1] = window
        inputs, labels = full[:-1], full[1:].copy()
        inputs = inputs.copy()
        inputs[real:] = pad_token_id  # the last token is a label only
        mask = np.zeros(seq_length, dtype=np.int32)
        mask[:real] = 1
        yield Row(inputs, labels, mask)
