"""Layer spec `fused`: the GPT layer on mindferry's kernels, for CPUs.

The parameter tree is mindformers' own: every cell below is its class with another `construct`. Activations
between layers are float32; inside a layer they have the compute dtype.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.training_graph.transformer.norm import LayerNorm, RMSNorm
from mindformers.parallel_core.training_graph.transformer.transformer_block import TransformerBlockSubmodules
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore import ops

from mindferry import kernels
from mindferry.kernels.settings import ACTIVATIONS, LayerSettings
from mindferry.layers.fused_ops import EmbeddingOp, HeadLossOp, LayerOp, LinearOp, NormOp
from mindferry.layers.portable import make_portable, portable_layer_spec


def computes_in_bf16(config) -> bool:
    """Whether the kernels multiply in bfloat16: compute_dtype asks for it and the CPU can."""
    return config.compute_dtype == ms.bfloat16 and kernels.has_bf16()


def why_not(config, activation) -> str:
    """'' when the fused layer can stand for this configuration here, else the reason.

    Args:
        config: mindformers TransformerConfig.
        activation: the exact function, a mindferry.spec.Activation.
    """
    if activation not in ACTIVATIONS:
        return f"no kernel for activation {activation}"
    if config.qk_layernorm and config.normalization != "RMSNorm":
        return f"no kernel for {config.normalization} of query and key"
    for name, reason in (
        ("multi_latent_attention", "no kernel for latent attention"),
        ("num_moe_experts", "no kernel for experts"),
        ("apply_residual_connection_post_layernorm", "no kernel for residuals after the norm"),
        ("sequence_parallel", "kernels work within one process"),
    ):
        if getattr(config, name, None):
            return reason
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if (getattr(config, name, None) or 1) > 1:
            return f"kernels work within one process, {name} is above 1"
    try:
        kernels.load()
    except kernels.KernelsUnavailable as err:
        return str(err)
    return ""


def layer_settings(config, activation, **changes) -> LayerSettings:
    """The kernels' settings for a mindformers TransformerConfig, `changes` applied."""
    values = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_groups": config.num_query_groups or config.num_attention_heads,
        "head_dim": config.kv_channels,
        "ffn_hidden_size": config.ffn_hidden_size,
        "activation": activation,
        "gated": bool(config.gated_linear_unit),
        "interleaved": bool(config.use_interleaved_weight_layout_mlp),
        "contiguous_qkv": bool(config.use_contiguous_weight_layout_attention),
        "bf16": computes_in_bf16(config),
        "rms": config.normalization == "RMSNorm",
        "qkv_bias": bool(config.add_bias_linear or config.add_qkv_bias),
        "bias": bool(config.add_bias_linear),
        "qk_norm": bool(config.qk_layernorm),
        "attention_dropout": float(config.attention_dropout or 0.0),
        "hidden_dropout": float(config.hidden_dropout or 0.0),
        "eps": float(config.layernorm_epsilon),
    }
    return LayerSettings(**{**values, **changes})


class FusedTransformerLayer(TransformerLayer):
    """mindformers' TransformerLayer as one operator forward and one backward.

    Inputs and outputs are TransformerLayer's; attention is causal, so attention_mask is not read. `recompute`
    of the layer, of self_attention or of mlp (as recompute_config sets them) is done inside the backward
    operator: QKV projection and fc1's output are made again instead of being kept.
    """

    def __init__(
        self,
        config,
        submodules,
        layer_number=1,
        hidden_dropout=None,
        activation="gelu_tanh",
        rotary_dim=0,
        parallel_residual=False,
    ):
        super().__init__(config, submodules, layer_number, hidden_dropout)
        self.activation, self.rotary_dim = activation, rotary_dim
        self.parallel_residual, self.qk_norm = parallel_residual, bool(config.qk_layernorm)
        self.rms = config.normalization == "RMSNorm"
        self.has_bias = bool(config.add_bias_linear)
        self.has_qkv_bias = bool(config.add_bias_linear or config.add_qkv_bias)
        self.absent = ms.Tensor([0.0], ms.float32)
        self.recompute_parts = ()
        self.self_attention.recompute = lambda *args, **kwargs: self.recompute_part("attention")
        self.mlp.recompute = lambda *args, **kwargs: self.recompute_part("mlp")
        self.recompute_part()

    def recompute(self, **kwargs):
        """Keep only the layer's input, the attention output and its log-sum-exp."""
        self.recompute_part("attention", "mlp")

    def recompute_part(self, *parts):
        """Make the operators for what is recomputed so far and `parts`."""
        self.recompute_parts = (*self.recompute_parts, *parts)
        settings = layer_settings(
            self.config,
            self.activation,
            rotary_half=self.rotary_dim // 2,
            parallel_residual=self.parallel_residual,
            recompute_attention="attention" in self.recompute_parts,
            recompute_mlp="mlp" in self.recompute_parts,
            hidden_dropout=float(self.hidden_dropout or 0.0),
        )
        self.train_op = LayerOp(settings)
        quiet = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
        self.eval_op = LayerOp(LayerSettings(**{**vars(settings), **quiet}))

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
        norm1, norm2, attention, mlp = (
            self.input_layernorm,
            self.pre_mlp_layernorm,
            self.self_attention,
            self.mlp,
        )
        none = self.absent
        gamma1 = norm1.weight if self.rms else norm1.gamma
        beta1 = none if self.rms else norm1.beta
        gamma2 = norm2.weight if self.rms else norm2.gamma
        beta2 = none if self.rms else norm2.beta
        qkv_bias = attention.linear_qkv.bias if self.has_qkv_bias else none
        proj_bias = attention.linear_proj.bias if self.has_bias else none
        fc1_bias = mlp.linear_fc1.bias if self.has_bias else none
        fc2_bias = mlp.linear_fc2.bias if self.has_bias else none
        query_gamma = attention.q_layernorm.weight if self.qk_norm else none
        key_gamma = attention.k_layernorm.weight if self.qk_norm else none
        rotary = none if rotary_pos_emb is None else rotary_pos_emb
        operator = self.train_op if self.training else self.eval_op
        output, _ = operator(
            hidden_states,
            gamma1,
            beta1,
            attention.linear_qkv.weight,
            qkv_bias,
            attention.linear_proj.weight,
            proj_bias,
            gamma2,
            beta2,
            mlp.linear_fc1.weight,
            fc1_bias,
            mlp.linear_fc2.weight,
            fc2_bias,
            query_gamma,
            key_gamma,
            rotary,
        )
        return output, context, extra_loss, attention_loss


class FusedLayerNorm(LayerNorm):
    """mindformers' LayerNorm as one operator; float32 in and out."""

    def __init__(self, config, dim, eps=1e-5):
        super().__init__(config, dim, eps)
        self.operator = NormOp(False, eps)

    def construct(self, x):
        output, _ = self.operator(x, self.gamma, self.beta)
        return output


class FusedRMSNorm(RMSNorm):
    """mindformers' RMSNorm as one operator; float32 in and out."""

    def __init__(self, config, dim, eps=1e-6):
        super().__init__(config, dim, eps)
        self.operator = NormOp(True, eps)
        self.absent = ms.Tensor([0.0], ms.float32)

    def construct(self, x):
        output, _ = self.operator(x, self.weight, self.absent)
        return output


class FusedGPTModel(GPTModel):
    """mindformers' GPTModel with embedding, layers, norm and head on the kernels.

    Inputs and outputs are GPTModel's. Attention is causal over the whole sequence; an attention_mask,
    prefixes, decoder_input or actual_seq_len of the caller's own are refused.
    """

    def construct(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        decoder_input=None,
        labels=None,
        extra_block_kwargs=None,
        prefix_keys_values=None,
        loss_mask=None,
        actual_seq_len=None,
    ):
        if attention_mask is not None or decoder_input is not None:
            raise ValueError(
                "layer_spec fused: attention is causal; attention_mask and decoder_input must be None"
            )
        if prefix_keys_values is not None or actual_seq_len is not None:
            raise ValueError("layer_spec fused: prefix_keys_values and actual_seq_len must be None")
        if position_ids is None:
            if self.config.use_eod_reset:
                raise ValueError("When use eod_reset, position_ids should not be None.")
            position_ids = ops.zeros_like(input_ids)
        words = self.embedding.word_embeddings.weight
        places = self.embedding.position_embeddings.weight if self.learned_positions else self.absent
        embed = self.train_embedding if self.training else self.eval_embedding
        hidden_states, _, words = embed(
            ops.cast(input_ids, ms.int32), ops.cast(position_ids, ms.int32), words, places
        )
        rotary = None
        if self.rotary_length > 0:
            # The product makes a tensor of its own; a slice would be a view in PyNative.
            seq_length = input_ids.shape[1]
            whole = seq_length == self.rotary_length
            rotary = self.rotary_table if whole else self.rotary_table[:, :seq_length] * 1.0
        hidden_states, extra_loss, attention_loss = self.decoder(hidden_states, None, rotary)
        weight = words if self.share_embeddings_and_output_weights else self.output_layer.weight
        if not self.training:
            rows = ops.reshape(ops.transpose(hidden_states, (1, 0, 2)), (-1, self.hidden_size))
            return self.logits(rows, weight, self.absent)

        mask = ops.cast(ops.not_equal(labels, self.ignore_token_id), ms.float32)
        if loss_mask is None:
            loss_mask = ops.cast(ops.not_equal(input_ids, self.pad_token_id), ms.float32)
        mask = ops.reshape(mask * loss_mask, (-1,))
        loss, count, _, _ = self.head(
            hidden_states, weight, ops.reshape(ops.cast(labels, ms.int32), (-1,)), mask
        )
        if self.calculate_per_token_loss:
            return (
                loss,
                count,
                self.init_numerator1,
                self.init_denominator1,
                extra_loss * count,
                attention_loss * count,
            )
        return loss, self.init_mtp_loss, extra_loss, attention_loss


def fused_layer_spec(config, activation, rotary_dim=0, parallel_residual=False):
    """TransformerBlockSubmodules of `config.num_layers` fused layers; same parameters as the portable ones.

    Args:
        config: mindformers TransformerConfig.
        activation: the exact function, a mindferry.spec.Activation.
        rotary_dim: rotated columns of a head; 0: no rotary positions.
        parallel_residual: attention and MLP side by side (GPT-NeoX).
    """
    layer = portable_layer_spec(config, activation).layer_specs[0]
    layer.module = FusedTransformerLayer
    layer.params = {
        "activation": activation,
        "rotary_dim": rotary_dim,
        "parallel_residual": parallel_residual,
    }
    norm = FusedRMSNorm if config.normalization == "RMSNorm" else FusedLayerNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)


def make_fused(model, config, embedding_dropout=0.0, rotary=None) -> None:
    """Give a FusedGPTModel its operators, and make portable what the kernels leave alone.

    Args:
        model: a FusedGPTModel built with fused_layer_spec.
        config: its TransformerConfig.
        embedding_dropout: probability of dropping an element of the embedding's output.
        rotary: (cosines, sines) of mindferry.layers.rotary.rotary_tables, for models with rotary positions.
    """
    make_portable(model, rotary)
    model.rotary_length = 0
    if rotary is not None:
        cosines, sines = rotary
        half = cosines.shape[1] // 2
        model.rotary_length = cosines.shape[0]
        model.rotary_table = ms.Tensor(np.stack((cosines[:, :half], sines[:, :half])))
    bf16 = computes_in_bf16(config)
    model.learned_positions = config.position_embedding_type == "learned_absolute"
    positions = model.max_sequence_length if model.learned_positions else 0
    model.absent = ms.Tensor([0.0], ms.float32)
    table = (model.vocab_size, positions, model.hidden_size)
    tied = bool(model.share_embeddings_and_output_weights)
    model.train_embedding = EmbeddingOp(*table, embedding_dropout, tied)
    model.eval_embedding = EmbeddingOp(*table, 0.0, tied)
    model.head = HeadLossOp(bf16, mean=not model.calculate_per_token_loss)
    model.logits = LinearOp(bf16, has_bias=False)
    kernels.seed_step(ms.get_seed() or 0, 0)
