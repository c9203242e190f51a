"""A transformer layer in PyTorch, float64, written from the published definitions; autograd gives the gradients."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from mindferry.kernels.library import Library
from mindferry.kernels.settings import LayerSettings

ACTIVATIONS = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "relu": F.relu,
}


def norm(s: LayerSettings, x, gamma, beta):
    if s.rms:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.eps) * gamma
    return F.layer_norm(x, x.shape[-1:], gamma, beta, s.eps)


def split_qkv(s: LayerSettings, qkv):
    """[S, B, rows] -> q [B, N, S, D], k and v [B, G, S, D]."""
    seq, batch, _ = qkv.shape
    n, g, d = s.num_heads, s.num_groups, s.head_dim
    if s.contiguous_qkv:
        q, k, v = qkv.split((n * d, g * d, g * d), -1)
        q = q.reshape(seq, batch, n, d)
    else:
        q, k, v = qkv.reshape(seq, batch, g, (n // g + 2) * d).split((n // g * d, d, d), -1)
        q = q.reshape(seq, batch, n, d)
    return (t.reshape(seq, batch, -1, d).permute(1, 2, 0, 3) for t in (q, k, v))


def rotate(x, table):
    """GPT-NeoX rotation of the first columns of x [B, N, S, D]; table [2, S, half]."""
    half = table.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = table[0], table[1]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def layer(s: LayerSettings, x, p: list, table=None):
    """x [S, B, H] through one layer without dropout; `p` has all fourteen slots, None where absent."""
    g1, b1, wq, bq, wp, bp, g2, b2, w1, c1, w2, c2, gq, gk = p
    q, k, v = split_qkv(s, F.linear(norm(s, x, g1, b1), wq, bq))
    if s.qk_norm:
        q, k = F.rms_norm(q, q.shape[-1:], gq, s.eps), F.rms_norm(k, k.shape[-1:], gk, s.eps)
    if table is not None:
        q, k = rotate(q, table), rotate(k, table)
    repeat = s.num_heads // s.num_groups
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(s.head_dim)
    scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    context = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).reshape(*x.shape[:2], -1)
    middle = x + F.linear(context, wp, bp)
    pre = F.linear(norm(s, x if s.parallel_residual else middle, g2, b2), w1, c1)
    if s.gated:
        gate, up = (pre[..., 0::2], pre[..., 1::2]) if s.interleaved else pre.chunk(2, -1)
        act = ACTIVATIONS[s.activation](gate) * up
    else:
        act = ACTIVATIONS[s.activation](pre)
    return middle + F.linear(act, w2, c2)


class Case:
    """Random inputs for one layer: arrays in the kernels' order."""

    def __init__(self, s: LayerSettings, seq: int, batch: int, seed: int = 0, scale: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.s, self.seq, self.batch = s, seq, batch
        self.x = (scale * rng.normal(0, 1, (seq, batch, s.hidden_size))).astype(np.float32)
        self.dy = rng.normal(0, 1, self.x.shape).astype(np.float32)
        self.params = [
            (
                rng.normal(0, 1 / math.sqrt(shape[-1]), shape)
                if len(shape) == 2
                else rng.normal(1, 0.3, shape)
            ).astype(np.float32)
            for shape in s.parameter_shapes().values()
        ]
        self.table = np.zeros(1, np.float32)
        if s.rotary_half:
            angle = np.outer(np.arange(seq), 10000.0 ** (-np.arange(s.rotary_half) / s.rotary_half))
            self.table = np.stack((np.cos(angle), np.sin(angle))).astype(np.float32)

    def run(self, lib: Library, s: LayerSettings | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """Output and gradients (input first, then each present parameter)."""
        s = s or self.s
        packed, absent = s.packed(), np.zeros(1, np.float32)
        slots = s.slots(self.params, absent)
        y = np.empty_like(self.x)
        kept = np.empty(lib.kept_bytes(packed, self.seq, self.batch), np.uint8)
        lib.call("mf_layer_forward", [packed, self.x, *slots, self.table], [y, kept])
        grads = [np.full_like(a, np.nan) for a in self.params]
        dx = np.empty_like(self.x)
        outputs = [dx, *s.slots(grads, np.zeros(1, np.float32))]
        lib.call("mf_layer_backward", [packed, self.x, *slots, self.table, kept, self.dy], outputs)
        return y, [dx, *grads]

    def expected(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The same from PyTorch in float64."""
        x = torch.tensor(self.x, dtype=torch.float64, requires_grad=True)
        params = [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in self.params]
        table = torch.tensor(self.table, dtype=torch.float64) if self.s.rotary_half else None
        y = layer(self.s, x, self.s.slots(params, None), table)
        y.backward(torch.tensor(self.dy, dtype=torch.float64))
        return y.detach().numpy(), [t.grad.numpy() for t in (x, *params)]


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference relative to the norm of what was expected."""
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30))
