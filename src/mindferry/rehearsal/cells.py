"""The cut parts of a GPT layer in NumPy, forward and backward written out.

Arrays are float32, activations [S, B, H] as in mindformers. Every `forward` returns its output and what `backward`
needs; gradients of parameters are added up in the Share. Megatron-LM's conjugate pair (arXiv 1909.08053, section 3)
is at the edges of the two linears: a column linear copies its input forward and sums its gradient backward, a row
linear sums forward and copies backward. With sequence parallel (arXiv 2205.05198) copy becomes gather and sum becomes
sum-and-slice along S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindferry.rehearsal.wire import Wire

Array = np.ndarray
Saved = Any


@dataclass
class Share:
    """The parameters of one rank and the sums of their gradients, by mindformers' names.

    Attributes:
        frozen: parameters that get no gradient.
        partial: parameters whose gradient is only this rank's part of a sum over the tensor group.
    """

    weights: dict[str, Array]
    frozen: frozenset[str] = frozenset()
    gradients: dict[str, Array] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def add(self, name: str, gradient: Array) -> None:
        if name in self.frozen:
            return
        if name in self.gradients:
            self.gradients[name] += gradient
        else:
            self.gradients[name] = np.array(gradient, np.float32)

    def bias(self, prefix: str) -> Array | None:
        return self.weights.get(f"{prefix}.bias")


def rows(x: Array) -> Array:
    """[S, B, H] -> [S * B, H]."""
    return x.reshape(-1, x.shape[-1])


class Norm:
    """LayerNorm (gamma, beta) or RMSNorm (weight) over the last axis."""

    def __init__(self, share: Share, prefix: str, epsilon: float) -> None:
        self.share, self.prefix, self.epsilon = share, prefix, epsilon
        self.rms = f"{prefix}.weight" in share.weights
        self.scale = f"{prefix}.{'weight' if self.rms else 'gamma'}"

    def sums_over_tensor_group(self) -> None:
        """Each rank sees a part of what is normalised only."""
        self.share.partial |= {self.scale} if self.rms else {self.scale, f"{self.prefix}.beta"}

    def forward(self, x: Array) -> tuple[Array, Saved]:
        centred = x if self.rms else x - x.mean(-1, keepdims=True)
        inverse = 1.0 / np.sqrt((centred * centred).mean(-1, keepdims=True) + np.float32(self.epsilon))
        normal = centred * inverse
        y = normal * self.share.weights[self.scale]
        if not self.rms:
            y = y + self.share.weights[f"{self.prefix}.beta"]
        return y, (normal, inverse)

    def backward(self, dy: Array, saved: Saved) -> Array:
        normal, inverse = saved
        self.share.add(self.scale, rows(dy * normal).sum(0))
        if not self.rms:
            self.share.add(f"{self.prefix}.beta", rows(dy).sum(0))
        inner = dy * self.share.weights[self.scale]
        dx = inner - normal * (inner * normal).mean(-1, keepdims=True)
        if not self.rms:
            dx = dx - inner.mean(-1, keepdims=True)
        return dx * inverse


class ColumnLinear:
    """x W^T + b with the rows of W (outputs) shared: x whole in, y in parts out."""

    def __init__(self, share: Share, prefix: str, wire: Wire, sequence: bool, weight: str = "") -> None:
        self.share, self.prefix, self.wire, self.sequence = share, prefix, wire, sequence
        self.weight = weight or f"{prefix}.weight"

    def forward(self, x: Array) -> tuple[Array, Saved]:
        whole = self.wire.gather("tensor", x) if self.sequence else x
        y = whole @ self.share.weights[self.weight].T
        bias = self.share.bias(self.prefix)
        return (y if bias is None else y + bias), whole

    def backward(self, dy: Array, whole: Saved) -> Array:
        self.share.add(self.weight, rows(dy).T @ rows(whole))
        if self.share.bias(self.prefix) is not None:
            self.share.add(f"{self.prefix}.bias", rows(dy).sum(0))
        dx = dy @ self.share.weights[self.weight]
        return self.wire.scatter_sum("tensor", dx) if self.sequence else self.wire.sum("tensor", dx)


class RowLinear:
    """x W^T + b with the columns of W (inputs) shared: x in parts in, y whole out; b is added once, to the sum."""

    def __init__(self, share: Share, prefix: str, wire: Wire, sequence: bool) -> None:
        self.share, self.prefix, self.wire, self.sequence = share, prefix, wire, sequence
        if sequence and share.bias(prefix) is not None:
            share.partial.add(f"{prefix}.bias")

    def forward(self, x: Array) -> tuple[Array, Saved]:
        part = x @ self.share.weights[f"{self.prefix}.weight"].T
        y = self.wire.scatter_sum("tensor", part) if self.sequence else self.wire.sum("tensor", part)
        bias = self.share.bias(self.prefix)
        return (y if bias is None else y + bias), x

    def backward(self, dy: Array, x: Saved) -> Array:
        if self.share.bias(self.prefix) is not None:
            self.share.add(f"{self.prefix}.bias", rows(dy).sum(0))
        whole = self.wire.gather("tensor", dy) if self.sequence else dy
        self.share.add(f"{self.prefix}.weight", rows(whole).T @ rows(x))
        return whole @ self.share.weights[f"{self.prefix}.weight"]


class Rotary:
    """Rotates the first D of every head: x [S, B, N, head_dim]."""

    def __init__(self, cosines: Array, sines: Array) -> None:
        self.cosines, self.sines = cosines[:, None, None, :], sines[:, None, None, :]

    def forward(self, x: Array) -> Array:
        return self._turn(x, self.sines)

    def backward(self, dy: Array) -> Array:
        """The transpose of a rotation turns the other way."""
        return self._turn(dy, -self.sines)

    def _turn(self, x: Array, sines: Array) -> Array:
        dim = self.cosines.shape[-1]
        part = x[..., :dim]
        turned = np.concatenate((-part[..., dim // 2 :], part[..., : dim // 2]), -1)
        return np.concatenate((part * self.cosines + turned * sines, x[..., dim:]), -1)


class CoreAttention:
    """softmax(q k^T / sqrt(D) + causal mask) v; q [S, B, N, D], k and v [S, B, G, D] -> [S, B, N * D]."""

    def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Saved]:
        length, batch, heads, dim = q.shape
        groups = k.shape[2]
        q = q.transpose(1, 2, 0, 3).reshape(batch, groups, heads // groups, length, dim)
        k, v = (x.transpose(1, 2, 0, 3)[:, :, None] for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) * np.float32(1.0 / math.sqrt(dim))
        scores = np.where(np.tri(length, dtype=bool), scores, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        probs = scores / scores.sum(-1, keepdims=True)
        context = (probs @ v).reshape(batch, heads, length, dim)
        return context.transpose(2, 0, 1, 3).reshape(length, batch, heads * dim), (q, k, v, probs)

    def backward(self, dy: Array, saved: Saved) -> tuple[Array, Array, Array]:
        q, k, v, probs = saved
        batch, groups, repeat, length, dim = q.shape
        dy = dy.reshape(length, batch, groups, repeat, dim).transpose(1, 2, 3, 0, 4)
        dv = (probs.swapaxes(-1, -2) @ dy).sum(2)
        dprobs = dy @ v.swapaxes(-1, -2)
        dscores = (
            probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) * np.float32(1.0 / math.sqrt(dim))
        )
        dq = (dscores @ k).reshape(batch, groups * repeat, length, dim)
        dk = (dscores.swapaxes(-1, -2) @ q).sum(2)
        return dq.transpose(2, 0, 1, 3), dk.transpose(2, 0, 1, 3), dv.transpose(2, 0, 1, 3)


def _gelu_tanh(x: Array) -> tuple[Array, Array]:
    """Value and derivative of 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    factor = np.float32(math.sqrt(2.0 / math.pi))
    inner = np.tanh(factor * (x + np.float32(0.044715) * x * x * x))
    slope = factor * (1.0 + np.float32(3 * 0.044715) * x * x) * (1.0 - inner * inner)
    return 0.5 * x * (1.0 + inner), 0.5 * (1.0 + inner) + 0.5 * x * slope


def _gelu_erf(x: Array) -> tuple[Array, Array]:
    from scipy.special import erf  # comes with MindSpore

    below = 0.5 * (1.0 + erf(x * np.float32(math.sqrt(0.5))))
    return x * below, below + x * np.exp(-0.5 * x * x) * np.float32(1.0 / math.sqrt(2.0 * math.pi))


def _silu(x: Array) -> tuple[Array, Array]:
    gate = 1.0 / (1.0 + np.exp(-x))
    return x * gate, gate * (1.0 + x * (1.0 - gate))


def _relu(x: Array) -> tuple[Array, Array]:
    return np.maximum(x, 0.0), (x > 0).astype(np.float32)


# mindferry.spec.Activation -> (value, derivative).
ACTIVATIONS = {"gelu_tanh": _gelu_tanh, "gelu_erf": _gelu_erf, "silu": _silu, "relu": _relu}


class VocabTable:
    """Embedding lookup with the rows of the table shared: ids [B, S] -> [S, B, H], or [S / ranks, B, H]."""

    def __init__(self, share: Share, name: str, wire: Wire, sequence: bool) -> None:
        self.share, self.name, self.wire, self.sequence = share, name, wire, sequence
        self.first = share.weights[name].shape[0] * wire.index("tensor")

    def forward(self, ids: Array) -> tuple[Array, Saved]:
        table = self.share.weights[self.name]
        local = ids.T - self.first
        mine = (local >= 0) & (local < len(table))
        local = np.where(mine, local, 0)
        part = table[local] * mine[..., None]
        y = self.wire.scatter_sum("tensor", part) if self.sequence else self.wire.sum("tensor", part)
        return y, (local, mine)

    def backward(self, dy: Array, saved: Saved) -> None:
        local, mine = saved
        whole = self.wire.gather("tensor", dy) if self.sequence else dy
        gradient = np.zeros_like(self.share.weights[self.name])
        np.add.at(gradient, local[mine], whole[mine])
        self.share.add(self.name, gradient)


class VocabLoss:
    """Cross-entropy with the vocabulary shared: logits [T, V / ranks] -> -log softmax(logits)[label] of each row.

    The largest logit of a row is found by a gather: MindSpore's CPU AllReduce knows sums only.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def forward(self, logits: Array, labels: Array) -> tuple[Array, Saved]:
        local = labels - logits.shape[1] * self.wire.index("tensor")
        mine = (local >= 0) & (local < logits.shape[1])
        local = np.where(mine, local, 0)
        highest = self.wire.gather("tensor", logits.max(1)[None]).max(0)
        powers = np.exp(logits - highest[:, None])
        picked = np.where(mine, logits[np.arange(len(local)), local] - highest, np.float32(0.0))
        total, picked = self.wire.sum("tensor", np.stack((powers.sum(1), picked)))
        return np.log(total) - picked, (powers / total[:, None], local, mine)

    def backward(self, weights: Array, saved: Saved) -> Array:
        """d (sum of weights * loss) / d logits = weights * (softmax - one hot)."""
        probs, local, mine = saved
        gradient = probs * weights[:, None]
        gradient[np.arange(len(local))[mine], local[mine]] -= weights[mine]
        return gradient
