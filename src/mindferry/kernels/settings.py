"""Settings of the kernels, in the order in which the C++ side reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mindferry.kernels.library import pack

T = TypeVar("T")

ACTIVATIONS = {"gelu_tanh": 0, "gelu_erf": 1, "silu": 2, "relu": 3}


@dataclass(frozen=True)
class LayerSettings:
    """One transformer layer.

    Attributes:
        rotary_half: half the rotated columns of a head; 0: no rotary positions.
        interleaved: gate and up rows of fc1 alternate (mindformers' default); else gate first.
        contiguous_qkv: QKV rows are all queries, all keys, all values; else group by group.
        keep: keep activations for a backward pass (training).
        qk_norm: RMSNorm of every query and key head before the rotation (Qwen3).
        parallel_residual: attention and MLP both read the layer's input (GPT-NeoX).
    """

    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    ffn_hidden_size: int
    activation: str = "gelu_tanh"
    gated: bool = False
    interleaved: bool = True
    contiguous_qkv: bool = False
    rotary_half: int = 0
    bf16: bool = False
    rms: bool = False
    qkv_bias: bool = True
    bias: bool = True
    recompute_attention: bool = False
    recompute_mlp: bool = False
    keep: bool = True
    qk_norm: bool = False
    parallel_residual: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    eps: float = 1e-5

    def packed(self) -> np.ndarray:
        """int64 [22]."""
        return pack(
            (
                self.hidden_size,
                self.num_heads,
                self.num_groups,
                self.head_dim,
                self.contiguous_qkv,
                self.ffn_hidden_size,
                self.rotary_half,
                ACTIVATIONS[self.activation],
                self.gated,
                self.interleaved,
                self.bf16,
                self.rms,
                self.qkv_bias,
                self.bias,
                self.recompute_attention,
                self.recompute_mlp,
                self.keep,
                self.qk_norm,
                self.parallel_residual,
                float(self.attention_dropout),
                float(self.hidden_dropout),
                float(self.eps),
            )
        )

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names within a layer and shapes, in the order of the kernels' arguments."""
        hidden, wide = self.hidden_size, self.ffn_hidden_size * (2 if self.gated else 1)
        qkv = (self.num_heads + 2 * self.num_groups) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {}

        def norm(name: str) -> None:
            if self.rms:
                shapes[f"{name}.weight"] = (hidden,)
            else:
                shapes[f"{name}.gamma"] = (hidden,)
                shapes[f"{name}.beta"] = (hidden,)

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        norm("input_layernorm")
        linear("self_attention.linear_qkv", qkv, hidden, self.qkv_bias)
        linear("self_attention.linear_proj", hidden, self.num_heads * self.head_dim, self.bias)
        norm("pre_mlp_layernorm")
        linear("mlp.linear_fc1", wide, hidden, self.bias)
        linear("mlp.linear_fc2", hidden, self.ffn_hidden_size, self.bias)
        if self.qk_norm:
            shapes["self_attention.q_layernorm.weight"] = (self.head_dim,)
            shapes["self_attention.k_layernorm.weight"] = (self.head_dim,)
        return shapes

    def slots(self, present: Sequence[T], absent: T) -> list[T]:
        """The kernels' fourteen parameter arguments: `present` in order, `absent` where the layer has none."""
        has_beta, bias = not self.rms, self.bias
        has = [True, has_beta, True, self.qkv_bias, True, bias, True, has_beta, True, bias, True, bias]
        has += [self.qk_norm] * 2
        rest = iter(present)
        return [next(rest) if there else absent for there in has]
