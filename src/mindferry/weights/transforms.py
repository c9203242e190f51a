"""What can happen to a tensor between two checkpoints: small classes, each with its way back.

A transform takes a list of arrays and gives a list of arrays. Weights and biases are treated alike: only
the first axis (rows, the output features of a Linear) carries structure, the rest follows.
Symbols: a attention heads, g key/value groups, d size of a head, r = a / g, H hidden size, F MLP size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindferry.spec import ModelSpec

Shape = tuple[int, ...]
Arrays = list[np.ndarray]

# How the rows of a fused query/key/value projection are packed.
#   flat            [q of all heads | k of all groups | v of all groups]          HF GPT-2, nanoGPT
#   per_group       for each group: [q of its r heads | k | v]                     Megatron >= 2.0, GPT-NeoX
#   head_dim_three  for each head, each of its d channels: q, k, v                 Megatron 1.0
QKVLayout = Literal["flat", "per_group", "head_dim_three"]
# How the two branches of a gated MLP share one matrix.
#   concatenated    [gate; up]
#   interleaved     gate[0], up[0], gate[1], up[1], ...
GateUpLayout = Literal["concatenated", "interleaved"]


@dataclass(frozen=True)
class TargetLayout:
    """How the fused matrices of the mindformers network are packed.

    The parameter names and shapes are the same in every layout, so the run must state which one it uses
    (`use_contiguous_weight_layout_attention`, `use_interleaved_weight_layout_mlp`). The defaults here are
    those of mindformers 1.9.0.
    """

    qkv: QKVLayout = "per_group"
    gate_up: GateUpLayout = "interleaved"

    def config(self) -> dict[str, bool]:
        """The keys of mindformers' model_config that state this layout."""
        return {
            "use_contiguous_weight_layout_attention": self.qkv == "flat",
            "use_interleaved_weight_layout_mlp": self.gate_up == "interleaved",
        }


class Transform(ABC):
    """One reversible change: `backward(forward(x)) == x`, bit for bit.

    Transforms that drop rows are the exception: the way back fills them with zeros.
    """

    @abstractmethod
    def forward(self, arrays: Arrays) -> Arrays:
        """Source side to target side."""

    @abstractmethod
    def backward(self, arrays: Arrays) -> Arrays:
        """Target side to source side."""

    @abstractmethod
    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        """The shapes `forward` needs to give arrays of `shapes`."""


class Transpose(Transform):
    """Swaps the two axes of a matrix: HF's Conv1D keeps [in, out] where a Linear keeps [out, in]."""

    def forward(self, arrays: Arrays) -> Arrays:
        return [array.T for array in arrays]

    backward = forward

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [shape[::-1] for shape in shapes]


@dataclass(frozen=True)
class SplitQKV(Transform):
    """One fused projection -> [q, k, v] with a*d, g*d and g*d rows."""

    layout: QKVLayout
    heads: int
    groups: int
    head_dim: int

    def forward(self, arrays: Arrays) -> Arrays:
        (fused,) = arrays
        a, g, d, rest = self.heads, self.groups, self.head_dim, fused.shape[1:]
        if self.layout == "flat":
            return [fused[: a * d], fused[a * d : (a + g) * d], fused[(a + g) * d :]]
        if self.layout == "per_group":
            by_group = fused.reshape(g, a // g + 2, d, *rest)
            q, k, v = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
            return [q.reshape(a * d, *rest), k.reshape(g * d, *rest), v.reshape(g * d, *rest)]
        by_head = fused.reshape(a, d, 3, *rest)
        return [by_head[:, :, i].reshape(a * d, *rest) for i in range(3)]

    def backward(self, arrays: Arrays) -> Arrays:
        q, k, v = arrays
        a, g, d, rest = self.heads, self.groups, self.head_dim, q.shape[1:]
        if self.layout == "flat":
            return [np.concatenate([q, k, v])]
        if self.layout == "per_group":
            parts = [
                q.reshape(g, a // g, d, *rest),
                k.reshape(g, 1, d, *rest),
                v.reshape(g, 1, d, *rest),
            ]
            return [np.concatenate(parts, axis=1).reshape((a + 2 * g) * d, *rest)]
        stacked = np.stack([part.reshape(a, d, *rest) for part in (q, k, v)], axis=2)
        return [stacked.reshape(3 * a * d, *rest)]

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [((self.heads + 2 * self.groups) * self.head_dim, *shapes[0][1:])]


@dataclass(frozen=True)
class SplitGateUp(Transform):
    """One matrix of 2F rows -> [gate, up] with F rows each."""

    layout: GateUpLayout

    def forward(self, arrays: Arrays) -> Arrays:
        (fused,) = arrays
        if self.layout == "concatenated":
            half = fused.shape[0] // 2
            return [fused[:half], fused[half:]]
        return [fused[0::2], fused[1::2]]

    def backward(self, arrays: Arrays) -> Arrays:
        gate, up = arrays
        if self.layout == "concatenated":
            return [np.concatenate([gate, up])]
        return [np.stack([gate, up], axis=1).reshape(2 * gate.shape[0], *gate.shape[1:])]

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [(2 * shapes[0][0], *shapes[0][1:])]


@dataclass(frozen=True)
class Inverse(Transform):
    """A transform run the other way round; `shapes` are those of the inner transform's target side."""

    inner: Transform
    shapes: Callable[[Shape], list[Shape]]

    def forward(self, arrays: Arrays) -> Arrays:
        return self.inner.backward(arrays)

    def backward(self, arrays: Arrays) -> Arrays:
        return self.inner.forward(arrays)

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return self.shapes(shapes[0])


@dataclass(frozen=True)
class CutRows(Transform):
    """Drops the rows that only pad the vocabulary; the way back pads with zeros."""

    rows: int
    padded_rows: int

    def forward(self, arrays: Arrays) -> Arrays:
        return [array[: self.rows] for array in arrays]

    def backward(self, arrays: Arrays) -> Arrays:
        (array,) = arrays
        padding = np.zeros((self.padded_rows - self.rows, *array.shape[1:]), array.dtype)
        return [np.concatenate([array, padding])]

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [(self.padded_rows, *shapes[0][1:])]


@dataclass(frozen=True)
class SkipRows(Transform):
    """Drops the first `count` rows (OPT's positions start at row 2); the way back puts zeros there."""

    count: int

    def forward(self, arrays: Arrays) -> Arrays:
        return [array[self.count :] for array in arrays]

    def backward(self, arrays: Arrays) -> Arrays:
        (array,) = arrays
        return [np.concatenate([np.zeros((self.count, *array.shape[1:]), array.dtype), array])]

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        return [(shapes[0][0] + self.count, *shapes[0][1:])]


@dataclass(frozen=True)
class Geometry:
    """What the transforms of one model need to know."""

    spec: ModelSpec
    layout: TargetLayout = TargetLayout()
    padded_vocab_size: int | None = None

    def split_qkv(self, layout: QKVLayout) -> SplitQKV:
        spec = self.spec
        return SplitQKV(layout, spec.num_attention_heads, spec.num_query_groups, spec.kv_channels)

    def join_qkv(self) -> Inverse:
        spec = self.spec
        q, kv = spec.num_attention_heads * spec.kv_channels, spec.num_query_groups * spec.kv_channels
        return Inverse(
            self.split_qkv(self.layout.qkv),
            lambda shape: [(rows, *shape[1:]) for rows in (q, kv, kv)],
        )

    def repack_qkv(self, layout: QKVLayout) -> list[Transform]:
        """From `layout` to the target's; nothing to do when they are the same."""
        return [] if layout == self.layout.qkv else [self.split_qkv(layout), self.join_qkv()]

    def repack_gate_up(self, layout: GateUpLayout) -> list[Transform]:
        """From `layout` to the target's; nothing to do when they are the same, or for a plain MLP."""
        same = layout == self.layout.gate_up or not self.spec.gated_linear_unit
        return [] if same else [SplitGateUp(layout), self.join_gate_up()]

    def join_gate_up(self) -> Inverse:
        ffn = self.spec.ffn_hidden_size
        return Inverse(SplitGateUp(self.layout.gate_up), lambda shape: [(ffn, *shape[1:])] * 2)


# The words a weight rule may use. Each stands for the transforms that take the source's layout to the
# target's; applied left to right.
WORDS: dict[str, Callable[[Geometry], list[Transform]]] = {
    "transpose": lambda at: [Transpose()],
    "qkv_flat": lambda at: at.repack_qkv("flat"),
    "qkv_per_group": lambda at: at.repack_qkv("per_group"),
    "qkv_head_dim_three": lambda at: at.repack_qkv("head_dim_three"),
    "qkv_separate": lambda at: [at.join_qkv()],
    "gate_up_separate": lambda at: [at.join_gate_up()],
    "gate_up_interleaved": lambda at: at.repack_gate_up("interleaved"),
    "gate_up_concatenated": lambda at: at.repack_gate_up("concatenated"),
    "skip_two_rows": lambda at: [SkipRows(2)],
    "vocab_rows": lambda at: [CutRows(at.spec.vocab_size, at.padded_vocab_size or at.spec.vocab_size)],
}


@dataclass(frozen=True)
class Chain(Transform):
    """Transforms in a row, named by the words of the rule."""

    words: tuple[str, ...]
    steps: tuple[Transform, ...]

    @classmethod
    def of(cls, words: tuple[str, ...], geometry: Geometry) -> Chain:
        return cls(words, tuple(step for word in words for step in WORDS[word](geometry)))

    def forward(self, arrays: Arrays) -> Arrays:
        for step in self.steps:
            arrays = step.forward(arrays)
        return arrays

    def backward(self, arrays: Arrays) -> Arrays:
        for step in reversed(self.steps):
            arrays = step.backward(arrays)
        return arrays

    def source_shapes(self, shapes: list[Shape]) -> list[Shape]:
        for step in reversed(self.steps):
            shapes = step.source_shapes(shapes)
        return shapes
