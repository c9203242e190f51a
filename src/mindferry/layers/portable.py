"""GPT layers from stock MindSpore operators, for any device that MindSpore runs on.

mindformers 1.9.0 builds its training GPTModel for Ascend: FlashAttentionScore, EmbeddingDenseBackward and
DropoutExt have no CPU kernel, and `ops.Morph` exists in graph mode only. `portable_layer_spec` swaps the
parts that its ModuleSpec names; `make_portable` swaps, in one built model, those that GPTModel creates by
itself. Parameter names, shapes and layouts are mindformers' own in every case, so a checkpoint fits all
layer specs alike.
"""

from __future__ import annotations

import math

import mindspore as ms
from mindformers.parallel_core.training_graph.activation import GELU
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from mindformers.parallel_core.training_graph.tensor_parallel.layers import VocabParallelEmbedding
from mindformers.parallel_core.training_graph.transformer.attention import (
    Attention,
    SelfAttention,
    SelfAttentionContiguous,
)
from mindformers.parallel_core.training_graph.transformer.dropout import Dropout
from mindformers.parallel_core.training_graph.transformer.mlp import MLPInterleaved
from mindformers.parallel_core.training_graph.transformer.norm import get_norm_cls
from mindformers.parallel_core.training_graph.transformer.transformer_block import TransformerBlockSubmodules
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore import nn, ops
from mindspore.ops.auto_generate import SplitWithSize
from mindspore.ops.operations import Morph

from mindferry.layers.dropout import PortableDropout
from mindferry.layers.rotary import ApplyRotary, RotaryTables


class CoreAttention(nn.Cell):
    """softmax(q k^T / sqrt(d) + mask) v with the S x S scores in memory.

    Inputs: query [S, B, N, D], key and value [S, B, G, D] (G divides N), attention_mask [B, 1, S, S] with
    1 = masked (mindformers' sense). Output: [S, B, N*D] in the dtype of query. Scores are scaled in the
    compute dtype, as PyTorch's scaled_dot_product_attention does; softmax runs in softmax_compute_dtype.
    """

    def __init__(self, config, layer_number=1, **unused):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_groups = config.num_query_groups
        self.head_dim = config.kv_channels
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.softmax_dtype = config.softmax_compute_dtype
        self.lowest = float(ms.Tensor(-65504.0 if self.softmax_dtype == ms.float16 else -3.0e38).asnumpy())
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.context = ops.BatchMatMul()
        self.softmax = ops.Softmax(axis=-1)
        self.use_dropout = config.attention_dropout > 0.0
        self.dropout = PortableDropout(config.attention_dropout)

    def construct(self, query, key, value, attention_mask):
        """Attend; see the class for shapes."""
        seq_length, batch = query.shape[0], query.shape[1]
        query = ops.transpose(query, (1, 2, 0, 3))
        key = self.spread(ops.transpose(key, (1, 2, 0, 3)))
        value = self.spread(ops.transpose(value, (1, 2, 0, 3)))
        scores = ops.cast(self.scores(query, key) * self.scale, self.softmax_dtype)
        scores = ops.masked_fill(scores, ops.cast(attention_mask, ms.bool_), self.lowest)
        probs = ops.cast(self.softmax(scores), query.dtype)
        if self.use_dropout:
            probs = self.dropout(probs)
        context = ops.transpose(self.context(probs, value), (2, 0, 1, 3))
        return ops.reshape(context, (seq_length, batch, self.num_heads * self.head_dim))

    def spread(self, x):
        """Give every query head its key/value head: [B, G, S, D] -> [B, N, S, D]."""
        if self.num_groups == self.num_heads:
            return x
        batch, groups, seq_length, head_dim = x.shape
        x = ops.reshape(x, (batch, groups, 1, seq_length, head_dim))
        x = ops.tile(x, (1, 1, self.num_heads // groups, 1, 1))
        return ops.reshape(x, (batch, self.num_heads, seq_length, head_dim))


class SelfAttentionUnrepeated(SelfAttention):
    """mindformers' SelfAttention, leaving the key/value heads to the core attention.

    Its `_repeat_kv` reads [S, B, G, D] as [B, G, S, D] (1.9.0) and mixes heads with grouped queries.
    """

    def _repeat_kv(self, x, rep):
        return x


class SelfAttentionContiguousUnrepeated(SelfAttentionContiguous):
    """The same for the packing [q | k | v] (use_contiguous_weight_layout_attention)."""

    def _repeat_kv(self, x, rep):
        return x


class NamedActivationMLP(MLPInterleaved):
    """MLP with an activation that mindformers' table lacks: its only `gelu` is the tanh approximation."""

    def __init__(self, config, submodules, activation, is_expert=False, input_size=None):
        super().__init__(config, submodules, is_expert=is_expert, input_size=input_size)
        self.activation_func = OTHER_ACTIVATIONS[activation]()


# mindferry.spec.Activation -> a cell, for those that are not mindformers' own.
OTHER_ACTIVATIONS = {"gelu_erf": lambda: GELU(approximate=False), "relu": nn.ReLU}


class ParallelResidualLayer(TransformerLayer):
    """x + attention(norm1(x)) + mlp(norm2(x)), as in GPT-NeoX; mindformers' layer knows the serial form only."""

    def construct(
        self,
        hidden_states,
        attention_mask=None,
        context=None,
        context_mask=None,
        rotary_pos_emb=None,
        prefix_keys_values=None,
        extra_loss=0.0,
        actual_seq_len=None,
        sharded_key=None,
        sharded_value=None,
        attention_loss=0.0,
    ):
        attended, attention_bias = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            prefix_keys_values=prefix_keys_values,
            actual_seq_len=actual_seq_len,
        )
        if attention_bias is not None:
            attended = attended + attention_bias
        transformed, mlp_bias, extra_loss = self.mlp(
            self.pre_mlp_layernorm(hidden_states), extra_loss=extra_loss
        )
        if mlp_bias is not None:
            transformed = transformed + mlp_bias
        output = (
            hidden_states + self.hidden_states_dropout(attended) + self.hidden_states_dropout(transformed)
        )
        return ops.cast(output, self.compute_dtype), context, extra_loss, attention_loss


class RowLookup(nn.Cell):
    """Embedding lookup: ids [B, S], weight [V, H] -> [B, S, H]. Gather has a CPU kernel and gradient."""

    def construct(self, ids, weight):
        return ops.gather(weight, ids, 0)


class SplitLast(nn.Cell):
    """Split the last axis into parts of the given sizes; stands in for SplitWithSize.

    SplitWithSize's gradient is wrong in PyNative on a CPU (MindSpore 2.9.0) as soon as a part is transposed
    afterwards: the incoming gradient is a strided view and is read as if it were contiguous.
    """

    def construct(self, x, sizes, axis):
        parts: tuple = ()
        start = 0
        for size in sizes:
            parts = (*parts, x[..., start : start + size])
            start = start + size
        return parts


class TokenLoss(nn.Cell):
    """-log softmax(logits)[label] of each row: logits [T, V] float32, labels [T] int32 >= 0 -> [T].

    MindSpore's Exp on a CPU is off by 8e-6 relative, and LogSoftmax with it; a loss near 10 would miss the
    source's by more than it may. Pow is good to 1e-6, and 2**x needs no rounded base.
    """

    LOG2_E = 1.4426950408889634

    def __init__(self):
        super().__init__()
        self.add_at = ops.TensorScatterElements(axis=1, reduction="add")

    def construct(self, logits, labels):
        highest = ops.ReduceMax(True)(logits, 1)
        powers = ops.Pow()(2.0, (logits - highest) * self.LOG2_E)
        log_sum = ops.Log()(ops.ReduceSum()(powers, 1)) + ops.reshape(highest, (-1,))
        return log_sum - self.picked(logits, labels)

    def picked(self, logits, labels):
        """The logit of each row's label."""
        return ops.reshape(ops.gather_d(logits, 1, ops.expand_dims(labels, 1)), (-1,))

    def bprop(self, logits, labels, out, dout):
        """d loss / d logits = softmax - one_hot(label)."""
        log_sum = ops.expand_dims(out + self.picked(logits, labels), 1)
        weight = ops.expand_dims(dout, 1)
        gradient = ops.Exp()(logits - log_sum) * weight
        return self.add_at(gradient, ops.expand_dims(labels, 1), -weight), ops.zeros_like(labels)


class CrossEntropy(nn.Cell):
    """Mean negative log-likelihood over the tokens whose mask is 1.

    Inputs: logits [T, V] float32, labels [T] int32, loss_mask [T] float32. Output [1], or with per-token loss
    the pair (sum, count), as mindformers' CrossEntropyLoss returns them, with its 1e-8 in the count. That one
    needs OneHotExt, which PyNative does not have on a CPU, and holds a one-hot matrix [T, V].
    """

    def __init__(self, per_token_loss):
        super().__init__()
        self.per_token_loss = per_token_loss
        self.token_loss = TokenLoss()
        self.tiny = ms.Tensor([1e-8], ms.float32)

    def construct(self, logits, labels, loss_mask):
        # Ignored labels are negative; their mask is 0, the row only has to exist.
        losses = self.token_loss(ops.cast(logits, ms.float32), ops.maximum(labels, 0))
        mask = ops.cast(ops.reshape(loss_mask, (-1,)), ms.float32)
        total = ops.reshape(ops.ReduceSum()(losses * mask), (1,))
        count = ops.reshape(ops.ReduceSum()(mask), (1,)) + self.tiny
        if self.per_token_loss:
            return total, count
        return total / count


def portable_layer_spec(config, activation, parallel_residual=False):
    """TransformerBlockSubmodules of `config.num_layers` portable layers.

    Args:
        config: mindformers TransformerConfig.
        activation: the exact function, a mindferry.spec.Activation.
        parallel_residual: attention and MLP side by side (GPT-NeoX).
    """
    layer = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm,
        fused_norm=False,
        use_contiguous_weight_layout_attention=config.use_contiguous_weight_layout_attention,
        use_interleaved_weight_layout_mlp=config.use_interleaved_weight_layout_mlp,
    )
    layer.submodules.self_attention.module = (
        SelfAttentionContiguousUnrepeated
        if config.use_contiguous_weight_layout_attention
        else SelfAttentionUnrepeated
    )
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    if parallel_residual:
        layer.module = ParallelResidualLayer
    if activation in OTHER_ACTIVATIONS:
        layer.submodules.mlp.module = NamedActivationMLP
        layer.submodules.mlp.params = {"activation": activation}
    return TransformerBlockSubmodules(
        layer_specs=[layer] * config.num_layers, layer_norm=get_norm_cls(fused_norm=False)
    )


# Morph attributes of mindformers' cells -> the method of the same cell that the Morph wraps. On one device
# a Morph does nothing but call it.
_MORPHS = {
    "morphed_forward_with_bias": "forward_func_with_bias",
    "morphed_forward": "forward_func",
    "morphed_reshape_logits": "forward_func_logits",
    "morphed_reshape_labels_and_masks": "forward_func_labels_and_masks",
}


def make_portable(model, rotary=None) -> None:
    """Replace, in this one GPTModel, what has no CPU kernel or no PyNative form.

    Only attributes of the given instance change; mindformers' classes stay as they are.

    Args:
        rotary: (cosines, sines) of mindferry.layers.rotary.rotary_tables, for models with rotary positions.

    Raises:
        RuntimeError: a Morph is left that this table does not know (another mindformers version).
    """
    lookup, split = RowLookup(), SplitLast()
    model.loss = CrossEntropy(model.calculate_per_token_loss)
    apply_rotary = ApplyRotary()
    if rotary is not None:
        model.rotary_pos_emb = RotaryTables(*rotary)
    for _, cell in model.cells_and_names():
        if isinstance(cell, VocabParallelEmbedding):
            cell.embedding_morph = lookup
        if isinstance(cell, Attention):
            cell.apply_rotary_pos_emb = apply_rotary
        for morph, method in _MORPHS.items():
            if isinstance(getattr(cell, morph, None), Morph):
                setattr(cell, morph, getattr(cell, method))
        for name, value in list(vars(cell).items()):
            if isinstance(value, SplitWithSize):
                setattr(cell, name, split)
        for name, child in list(cell.name_cells().items()):
            if isinstance(child, Dropout):
                setattr(cell, name, PortableDropout(child.p))
    left = [
        f"{path or 'model'}.{name}"
        for path, cell in model.cells_and_names()
        for name, value in vars(cell).items()
        if isinstance(value, Morph)
    ]
    if left:
        raise RuntimeError(f"portable layers know mindformers 1.9.0; these Morphs are new: {', '.join(left)}")
