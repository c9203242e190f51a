"""Slices of a parameter written out by hand, one function a kind: the independent side of the tests."""

from __future__ import annotations

import numpy as np

from mindferry.spec import ModelSpec


def share(name: str, whole: np.ndarray, mp: int, rank: int, spec: ModelSpec, contiguous: bool) -> np.ndarray:
    """What tensor-parallel rank `rank` of `mp` holds of the parameter `name`."""
    kind = name.removeprefix("adam_m.").removeprefix("adam_v.")
    if kind.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(whole, mp, axis=1)[rank]
    if ".linear_qkv." in kind:
        return _qkv(whole, mp, rank, spec, contiguous)
    if ".linear_fc1." in kind:
        return _fc1(whole, mp, rank, spec, contiguous)
    if kind.startswith(("embedding.", "output_layer.")):
        return np.split(whole, mp, axis=0)[rank]
    return whole


def _qkv(whole: np.ndarray, mp: int, rank: int, spec: ModelSpec, contiguous: bool) -> np.ndarray:
    """Heads one by one: a rank has every query head of its groups, and their keys and values."""
    d, a, g = spec.kv_channels, spec.num_attention_heads, spec.num_query_groups
    per_group = a // g
    mine = range(rank * g // mp, (rank + 1) * g // mp)
    if contiguous:
        q = [
            whole[h * d : (h + 1) * d]
            for group in mine
            for h in range(group * per_group, (group + 1) * per_group)
        ]
        k = [whole[(a + group) * d : (a + group + 1) * d] for group in mine]
        v = [whole[(a + g + group) * d : (a + g + group + 1) * d] for group in mine]
        return np.concatenate([*q, *k, *v])
    rows = (per_group + 2) * d
    return np.concatenate([whole[group * rows : (group + 1) * rows] for group in mine])


def _fc1(whole: np.ndarray, mp: int, rank: int, spec: ModelSpec, contiguous: bool) -> np.ndarray:
    """Channels one by one: a rank has gate and up of the channels it multiplies."""
    ffn = spec.ffn_hidden_size
    mine = range(rank * ffn // mp, (rank + 1) * ffn // mp)
    if not spec.gated_linear_unit:
        return whole[list(mine)]
    if contiguous:
        return np.concatenate([whole[list(mine)], whole[[ffn + c for c in mine]]])
    return whole[[row for c in mine for row in (2 * c, 2 * c + 1)]]
