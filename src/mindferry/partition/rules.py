"""Along which dimension tensor parallel cuts each parameter of mindformers' GPTModel.

Read from mindformers 1.9.0, parallel_core/training_graph: the layouts in `shard` of ColumnParallelLinear,
RowParallelLinear and VocabParallelEmbedding (tensor_parallel/layers.py), of SelfAttention and
SelfAttentionContiguous (transformer/attention.py), of MLP and MLPInterleaved (transformer/mlp.py).

A contiguous packing ([q | k | v], [gate; up]) is cut part by part: the split of the fused output there has
`skip_redistribution`, so each rank divides the sizes by the number of ranks and reads its own rows as a
packing of its own. MindSpore's automatic slicing of a whole checkpoint (`auto_trans_ckpt`) knows nothing of
parts and takes plain rows, which under such a packing is another model.

An embedding whose rows do not divide would stay whole (`enable_embedding_tp`), but in semi_auto_parallel
VocabParallelEmbedding divides its rows before that matters (`_init_embedding_rearrangement`) and stops. So rows
that do not divide are an error here, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mindferry.errors import MindferryError, UsageError, did_you_mean
from mindferry.spec import ModelSpec
from mindferry.weights.target import target_names
from mindferry.weights.transforms import Shape, TargetLayout

# Where a parameter lives in a pipeline: with the first stage, with the stage of its layer, or with the last.
Place = Literal["first", "layer", "last"]


@dataclass(frozen=True)
class PartitionRule:
    """One line of the table. `{}` stands for the layer number.

    Attributes:
        dim: the dimension that is cut; None keeps the parameter whole on every rank.
        keys: spec fields that the ranks must divide.
        parts: what the rows are made of in a contiguous packing.
    """

    pattern: str
    dim: int | None
    place: Place = "layer"
    keys: tuple[str, ...] = ()
    parts: Literal["qkv", "gate_up"] | None = None


_LAYER = "decoder.layers.{}."
_HEADS = ("num_attention_heads", "num_query_groups")
_NORMS = ("gamma", "beta", "weight")

RULES: tuple[PartitionRule, ...] = (
    PartitionRule("embedding.word_embeddings.weight", 0, "first", ("vocab_size",)),
    PartitionRule("embedding.position_embeddings.weight", 0, "first", ("max_position_embeddings",)),
    *(PartitionRule(f"{_LAYER}input_layernorm.{name}", None) for name in _NORMS),
    PartitionRule(_LAYER + "self_attention.linear_qkv.weight", 0, keys=_HEADS, parts="qkv"),
    PartitionRule(_LAYER + "self_attention.linear_qkv.bias", 0, keys=_HEADS, parts="qkv"),
    *(PartitionRule(f"{_LAYER}self_attention.q_layernorm.{name}", None) for name in _NORMS),
    *(PartitionRule(f"{_LAYER}self_attention.k_layernorm.{name}", None) for name in _NORMS),
    PartitionRule(_LAYER + "self_attention.linear_proj.weight", 1, keys=("num_attention_heads",)),
    PartitionRule(_LAYER + "self_attention.linear_proj.bias", None),
    *(PartitionRule(f"{_LAYER}pre_mlp_layernorm.{name}", None) for name in _NORMS),
    PartitionRule(_LAYER + "mlp.linear_fc1.weight", 0, keys=("ffn_hidden_size",), parts="gate_up"),
    PartitionRule(_LAYER + "mlp.linear_fc1.bias", 0, keys=("ffn_hidden_size",), parts="gate_up"),
    PartitionRule(_LAYER + "mlp.linear_fc2.weight", 1, keys=("ffn_hidden_size",)),
    PartitionRule(_LAYER + "mlp.linear_fc2.bias", None),
    *(PartitionRule(f"decoder.final_layernorm.{name}", None, "last") for name in _NORMS),
    PartitionRule("output_layer.weight", 0, "last", ("vocab_size",)),
)

# The optimizer's tensors are cut as the parameter that follows the prefix.
MOMENTS = ("adam_m.", "adam_v.")
MAX_SCALAR = (
    1  # elements of a tensor that may have any other name (global_step, loss_scale): every rank has it
)

_BY_PATTERN = {rule.pattern: rule for rule in RULES}
_LAYER_NUMBER = re.compile(r"^decoder\.layers\.(0|[1-9][0-9]{0,5})\.")


def parameter_of(name: str) -> str:
    """The parameter that `name` is, or that it is a moment of."""
    for prefix in MOMENTS:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def layer_of(name: str) -> int | None:
    """Number of the layer that a parameter (or moment) belongs to; None outside the layers."""
    found = _LAYER_NUMBER.match(parameter_of(name))
    return int(found.group(1)) if found else None


def rule_of(name: str) -> PartitionRule:
    """The line of the table for a parameter or one of its moments.

    Raises:
        MindferryError: the table has no such parameter.
    """
    pattern = _LAYER_NUMBER.sub(_LAYER, parameter_of(name))
    rule = _BY_PATTERN.get(pattern)
    if rule is None:
        raise MindferryError(
            f"{name}: no parameter of mindformers' GPTModel, so how it is cut is not known",
            remedy=did_you_mean(pattern, _BY_PATTERN) or "leave it out, or report the model it belongs to",
            id="partition.unknown-name",
        )
    return rule


@dataclass(frozen=True)
class Cut:
    """How one tensor of `shape` is shared among `ranks` tensor-parallel ranks.

    Attributes:
        dim: None where every rank keeps it whole.
        parts: sizes along `dim` of what is cut separately; one part, except in contiguous packings.
    """

    shape: Shape
    ranks: int
    dim: int | None
    parts: tuple[int, ...] = ()

    @property
    def local_shape(self) -> Shape:
        """Shape of one rank's share."""
        if self.dim is None:
            return self.shape
        return tuple(n // self.ranks if i == self.dim else n for i, n in enumerate(self.shape))

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """[start, stop) along `dim` of the whole tensor that `rank` holds, in the order it holds them."""
        if self.ranks == 1 and self.dim is not None:
            return [(0, self.shape[self.dim])]
        result, begin = [], 0
        for size in self.parts:
            share = size // self.ranks
            result.append((begin + rank * share, begin + (rank + 1) * share))
            begin += size
        return result

    def take(self, whole: np.ndarray, rank: int) -> np.ndarray:
        """The share of `rank`; a view where it lies in one piece."""
        if self.dim is None:
            return whole
        pieces = [whole[self.at(*span)] for span in self.ranges(rank)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=self.dim)

    def put(self, whole: np.ndarray, share: np.ndarray, rank: int) -> None:
        """Write the share of `rank` into its places in `whole`."""
        if self.dim is None:
            whole[...] = share
            return
        begin = 0
        for start, stop in self.ranges(rank):
            whole[self.at(start, stop)] = share[self.at(begin, begin + stop - start)]
            begin += stop - start

    def at(self, start: int, stop: int) -> tuple[slice, ...]:
        """Index of [start, stop) along `dim`."""
        return (slice(None),) * (self.dim or 0) + (slice(start, stop),)


def _parts(rule: PartitionRule, spec: ModelSpec, layout: TargetLayout, rows: int) -> tuple[int, ...]:
    if rule.parts == "qkv" and layout.qkv == "flat":
        q, kv = spec.num_attention_heads * spec.kv_channels, spec.num_query_groups * spec.kv_channels
        return (q, kv, kv)
    if rule.parts == "gate_up" and spec.gated_linear_unit and layout.gate_up == "concatenated":
        return (spec.ffn_hidden_size, spec.ffn_hidden_size)
    return (rows,)


def cut_of(name: str, shape: Shape, ranks: int, spec: ModelSpec, layout: TargetLayout) -> Cut:
    """How `ranks` tensor-parallel ranks share the tensor `name`, whose whole shape is `shape`.

    Args:
        name: of a parameter or one of its moments.

    Raises:
        MindferryError: no such parameter.
        UsageError: a size that the ranks do not divide.
    """
    rule = rule_of(name)
    if rule.dim is None:
        return Cut(shape, ranks, None)
    check_keys(rule.keys, spec, ranks)
    return Cut(shape, ranks, rule.dim, _parts(rule, spec, layout, shape[rule.dim]))


def check_keys(keys: tuple[str, ...], spec: ModelSpec, ranks: int) -> None:
    """Refuse sizes of `spec` that `ranks` tensor-parallel ranks do not divide.

    Raises:
        UsageError: with every such key and its value.
    """
    odd = [f"{key} {getattr(spec, key)}" for key in keys if getattr(spec, key) % ranks]
    if odd:
        padding = (
            "; --pad-vocab pads the vocabulary" if "vocab_size" in keys and spec.vocab_size % ranks else ""
        )
        raise UsageError(
            f"mp={ranks}: {', '.join(odd)} {'is no multiple' if len(odd) == 1 else 'are no multiples'} of it",
            cause="each tensor-parallel rank takes an equal share",
            remedy=f"choose an mp that divides {'it' if len(odd) == 1 else 'them'}{padding}",
            id="partition.indivisible",
        )


def cuts(spec: ModelSpec, layout: TargetLayout, ranks: int) -> Mapping[str, Cut]:
    """Every parameter of the network of `spec`, in network order: how `ranks` ranks share it."""
    return {name: cut_of(name, shape, ranks, spec, layout) for name, shape in target_names(spec).items()}
