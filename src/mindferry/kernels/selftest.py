"""Does each kernel compute what it should, here? Checked against numpy in float64 at every load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.kernels.build import has_bf16
from mindferry.kernels.library import Library, pack
from mindferry.kernels.settings import LayerSettings


def layer_reference(s: LayerSettings, x: np.ndarray, p: list[np.ndarray]) -> np.ndarray:
    """A LayerNorm, multi-head, gelu_tanh layer without dropout and rotation: x [S, B, H] -> [S, B, H], float64."""

    def norm(y: np.ndarray, gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
        centred = y - y.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + s.eps) * gamma + beta

    seq, batch, _ = x.shape
    qkv = (norm(x, p[0], p[1]) @ p[2].T + p[3]).reshape(seq, batch, s.num_heads, 3, s.head_dim)
    q, k, v = (qkv[:, :, :, i].transpose(1, 2, 0, 3) for i in range(3))
    if s.qk_norm:
        q, k = (y / np.sqrt((y**2).mean(-1, keepdims=True) + s.eps) * g for y, g in ((q, p[12]), (k, p[13])))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(s.head_dim)
    scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    context = (weights @ v).transpose(2, 0, 1, 3).reshape(seq, batch, -1)
    middle = x + context @ p[4].T + p[5]
    pre = norm(x if s.parallel_residual else middle, p[6], p[7]) @ p[8].T + p[9]
    act = 0.5 * pre * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (pre + 0.044715 * pre**3)))
    return middle + act @ p[10].T + p[11]


def _far(name: str, found: np.ndarray | float, expected: np.ndarray | float, tolerance: float) -> list[str]:
    error = float(np.max(np.abs(np.asarray(found, np.float64) - expected)))
    limit = tolerance * max(1.0, float(np.max(np.abs(expected))))
    return [] if error <= limit else [f"{name} is off by {error:.2g}"]


def _layer(lib: Library, kind: str, **changes: Any) -> list[str]:
    base = LayerSettings(hidden_size=32, num_heads=2, num_groups=2, head_dim=16, ffn_hidden_size=48)
    s = replace(base, **changes)
    rng = np.random.default_rng(1)
    p = [rng.normal(0, 0.3, shape).astype(np.float32) for shape in s.parameter_shapes().values()]
    x = rng.normal(0, 1, (9, 2, 32)).astype(np.float32)
    dy = rng.normal(0, 1, x.shape).astype(np.float32)
    settings, y, rotary = s.packed(), np.empty_like(x), np.zeros(1, np.float32)
    slots = s.slots(p, rotary)
    kept = np.empty(lib.kept_bytes(settings, 9, 2), np.uint8)
    lib.call("mf_layer_forward", [settings, x, *slots, rotary], [y, kept])
    grads = [np.empty_like(a) for a in (x, *p)]
    outputs = [grads[0], *s.slots(grads[1:], np.zeros(1, np.float32))]
    lib.call("mf_layer_backward", [settings, x, *slots, rotary, kept, dy], outputs)
    values = [a.astype(np.float64) for a in (x, *p)]
    name, tolerance = (f"{kind} in bfloat16", 4e-2) if s.bf16 else (kind, 1e-5)
    failed = _far(f"{name}: output", y, layer_reference(s, values[0], values[1:]), tolerance)
    # Along one random direction a gradient is one number, which central differences give as well.
    step = 1e-5
    ways = [rng.normal(0, 1, a.shape) for a in values]

    def loss(sign: float) -> float:
        moved = [a + sign * step * way for a, way in zip(values, ways, strict=True)]
        return float((layer_reference(s, moved[0], moved[1:]) * dy).sum())

    along = sum(float((g * way).sum()) for g, way in zip(grads, ways, strict=True))
    expected = (loss(1.0) - loss(-1.0)) / (2 * step)
    size = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads))
    return failed + _far(f"{name}: gradient", along / size, expected / size, tolerance)


def _head(lib: Library) -> list[str]:
    rng = np.random.default_rng(2)
    x = rng.normal(0, 1, (3, 2, 16)).astype(np.float32)
    w = rng.normal(0, 1, (37, 16)).astype(np.float32)
    labels, mask = rng.integers(0, 37, 6).astype(np.int32), np.ones(6, np.float32)
    loss, count, dx, dw = np.empty(1, np.float32), np.empty(1, np.float32), np.empty_like(x), np.empty_like(w)
    lib.call("mf_head_loss", [pack((False, True, True)), x, w, labels, mask], [loss, count, dx, dw])
    rows = x.astype(np.float64).transpose(1, 0, 2).reshape(6, 16)
    logits = rows @ w.T.astype(np.float64)
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    expected = -np.log(probs[np.arange(6), labels]).mean()
    dlogits = (probs - np.eye(37)[labels]) / 6
    return [
        *_far("cross-entropy", loss[0], expected, 1e-5),
        *_far("cross-entropy: weight gradient", dw, dlogits.T @ rows, 1e-5),
        *_far("cross-entropy: input gradient", dx.transpose(1, 0, 2).reshape(6, 16), dlogits @ w, 1e-5),
    ]


def _embedding(lib: Library) -> list[str]:
    rng = np.random.default_rng(3)
    words, places = (rng.normal(0, 1, (n, 8)).astype(np.float32) for n in (11, 5))
    ids, at = rng.integers(0, 11, (2, 4)).astype(np.int32), np.tile(np.arange(4, dtype=np.int32), (2, 1))
    settings, seed = pack((11, 5, 8, True, False, 0.0)), np.empty(1, np.int64)
    y, dwords, dplaces = np.empty((4, 2, 8), np.float32), np.empty_like(words), np.empty_like(places)
    lib.call("mf_embedding_forward", [settings, ids, at, words, places], [y, seed])
    dy = rng.normal(0, 1, y.shape).astype(np.float32)
    lib.call("mf_embedding_backward", [settings, ids, at, seed, dy], [dwords, dplaces])
    expected = np.zeros_like(words)
    np.add.at(expected, ids, dy.transpose(1, 0, 2))
    return [
        *_far("embedding", y, (words[ids] + places[at]).transpose(1, 0, 2), 1e-6),
        *_far("embedding: gradient", dwords, expected, 1e-6),
    ]


def _adamw(lib: Library) -> list[str]:
    rng = np.random.default_rng(4)
    p, m, g = (rng.normal(0, 1, 33).astype(np.float32) for _ in range(3))
    v = np.abs(rng.normal(0, 1, 33)).astype(np.float32)
    shared = np.array([0.9, 0.99, 1e-8, 0.1, 0.01, 0.5], np.float32)
    rate, decay = np.array([0.01], np.float32), np.array([0.1], np.float32)
    first, second = 0.9 * m + 0.1 * 0.5 * g, 0.99 * v + 0.01 * (0.5 * g) ** 2
    expected = p * (1 - 0.001) - 0.01 * (first / 0.1) / (np.sqrt(second / 0.01) + 1e-8)
    done, squares = np.empty(1, np.float32), np.empty(1, np.float32)
    lib.call("mf_squares", [g], [squares])
    lib.call("mf_adamw", [shared, rate, decay, p, m, v, g], [done])
    return [
        *_far("AdamW", p, expected, 1e-5),
        *_far("global norm", squares[0], float((g.astype(np.float64) ** 2).sum()), 1e-5),
    ]


def failures(lib: Library) -> list[str]:
    """One line for each kernel whose result is not numpy's; [] when all is well. Takes well under a second."""
    checks: list[Callable[[], list[str]]] = [
        lambda: _layer(lib, "layer"),
        lambda: _layer(lib, "layer with qk_norm", qk_norm=True),
        lambda: _layer(lib, "layer with parallel_residual", parallel_residual=True),
        lambda: _head(lib),
        lambda: _embedding(lib),
        lambda: _adamw(lib),
    ]
    if has_bf16():
        checks.append(lambda: _layer(lib, "layer", bf16=True))
        checks.append(lambda: _layer(lib, "layer with qk_norm", bf16=True, qk_norm=True))
    failed = []
    for check in checks:
        try:
            failed += check()
        except MindferryError as err:
            failed.append(err.message)
    return failed
