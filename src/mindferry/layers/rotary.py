"""Rotary positions with any of Hugging Face's scalings, as tables of cosines and sines.

mindformers' own RotaryEmbedding needs `Outer`, which has no CPU kernel, and GPTModel knows no scaling outside MLA
models: given `rope_scaling` of type llama3 or linear it silently builds no rotary embedding at all (1.9.0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops


def _plain(base: float, dim: int) -> np.ndarray:
    """base ** (-2i / dim) for i < dim / 2 (RoFormer, arXiv 2104.09864, section 3.2.2)."""
    return 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)


def _llama3(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1's release)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * frequencies / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (share + (1.0 - share) / factor)


def _yarn(
    base: float, dim: int, frequencies: np.ndarray, scaling: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Frequencies and attention factor of YaRN (arXiv 2309.00071, sections 3.2 and 3.4)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(scaling.get("beta_fast") or 32.0), dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True) is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    scaled = frequencies * (1.0 - ramp) + frequencies / factor * ramp

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        one, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = magnitude(one) / magnitude(all_dims) if one and all_dims else magnitude(1.0)
    return scaled, float(attention)


def rotary_tables(
    *, seq_length: int, dim: int, base: float, scaling: Mapping[str, Any] | None, max_position_embeddings: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [seq_length, dim], float32, the halves repeated (rotate-half layout).

    Angles are float32 products of position and frequency, as transformers computes them.

    Args:
        dim: rotated part of a head, even.
        scaling: fields of mindferry.spec.RopeScaling, or None.

    Raises:
        ValueError: a scaling type that is not one of linear, dynamic, yarn, llama3.
    """
    frequencies, attention = _plain(base, dim), 1.0
    kind = scaling["type"] if scaling else None
    if scaling is None:
        pass
    elif kind == "linear":
        frequencies = frequencies / scaling["factor"]
    elif kind == "dynamic":
        known = scaling.get("original_max_position_embeddings") or max_position_embeddings
        if seq_length > known:
            factor = scaling["factor"]
            stretched = base * (factor * seq_length / known - (factor - 1)) ** (dim / (dim - 2))
            frequencies = _plain(stretched, dim)
    elif kind == "llama3":
        frequencies = _llama3(frequencies, scaling)
    elif kind == "yarn":
        complete = {"original_max_position_embeddings": max_position_embeddings, **scaling}
        frequencies, attention = _yarn(base, dim, frequencies, complete)
    else:
        raise ValueError(f"rope scaling {kind!r} is not known")
    positions = np.arange(seq_length, dtype=np.float32)
    half = positions[:, None] * frequencies.astype(np.float32)[None, :]
    angles = np.concatenate([half, half], axis=1)
    scale = np.float32(attention)
    return np.cos(angles) * scale, np.sin(angles) * scale


class RotaryTables(nn.Cell):
    """Stands in for mindformers' RotaryEmbedding: gives (cosines, sines), each [S, 1, 1, D] float32."""

    def __init__(self, cosines, sines):
        super().__init__()
        self.cosines = ms.Tensor(cosines[:, None, None, :])
        self.sines = ms.Tensor(sines[:, None, None, :])

    def construct(self, seq_length, position_ids=None):
        return self.cosines[:seq_length], self.sines[:seq_length]


class ApplyRotary(nn.Cell):
    """Rotate the first D of every head: x [S, B, N, head_dim], tables (cosines, sines) -> like x."""

    def construct(self, x, tables):
        cosines, sines = tables
        dim = cosines.shape[-1]
        rotated = ops.cast(x[..., :dim], ms.float32)
        first, second = rotated[..., : dim // 2], rotated[..., dim // 2 :]
        turned = ops.concat((-second, first), axis=-1)
        result = ops.cast(rotated * cosines + turned * sines, x.dtype)
        if x.shape[-1] == dim:
            return result
        return ops.concat((result, x[..., dim:]), axis=-1)
