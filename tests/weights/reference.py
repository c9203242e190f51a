"""A decoder-only transformer in numpy float64, written from the papers, under mindformers' names.

Independent of the converter: it unpacks the fused matrices row by row, by index, instead of by reshape.
"""

from __future__ import annotations

import math

import numpy as np

from mindferry.spec import ModelSpec


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


ACTIVATIONS = {
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def _norm(x: np.ndarray, params: dict[str, np.ndarray], prefix: str, spec: ModelSpec) -> np.ndarray:
    eps = spec.layernorm_epsilon
    if spec.normalization == "RMSNorm":
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * params[f"{prefix}.weight"]
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * params[f"{prefix}.gamma"] + params[f"{prefix}.beta"]


def _linear(x: np.ndarray, params: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    y = x @ params[f"{prefix}.weight"].T
    return y + params[f"{prefix}.bias"] if f"{prefix}.bias" in params else y


def inverse_frequencies(spec: ModelSpec, length: int) -> tuple[np.ndarray, float]:
    """Rotary frequencies [rotary_dim / 2] and the factor on cos and sin; scaling as its papers define it."""
    dim = int(spec.kv_channels * spec.rotary_percent)
    base = spec.rotary_base ** (-np.arange(0, dim, 2) / dim)
    scaling = spec.rope_scaling
    if scaling is None:
        return base, 1.0
    if scaling.type == "dynamic":  # only acts on sequences longer than the model was trained for
        assert length <= spec.max_position_embeddings
        return base, 1.0
    if scaling.type == "linear":
        return base / scaling.factor, 1.0
    if scaling.type == "llama3":
        original = scaling.original_max_position_embeddings or 0
        low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
        out = []
        for freq in base:
            wavelength = 2 * math.pi / freq
            if wavelength < original / high:
                out.append(freq)
            elif wavelength > original / low:
                out.append(freq / scaling.factor)
            else:
                smooth = (original / wavelength - low) / (high - low)
                out.append((1 - smooth) * freq / scaling.factor + smooth * freq)
        return np.array(out), 1.0
    if scaling.type == "yarn":
        original = scaling.original_max_position_embeddings or spec.max_position_embeddings
        fast, slow = scaling.beta_fast or 32.0, scaling.beta_slow or 1.0

        def dimension_of(rotations: float) -> float:
            return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.rotary_base))

        low, high = dimension_of(fast), dimension_of(slow)
        if scaling.truncate is not False:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        attention = scaling.attention_factor
        if attention is None:
            attention = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
        return base / scaling.factor * ramp + base * (1 - ramp), attention
    raise NotImplementedError(scaling.type)


def _rotate(x: np.ndarray, spec: ModelSpec) -> np.ndarray:
    """x is [length, head_dim]; channel i turns with channel i + rotary_dim / 2."""
    freq, factor = inverse_frequencies(spec, len(x))
    half = len(freq)
    angle = np.arange(len(x))[:, None] * freq[None]
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)


def _attention(x: np.ndarray, params: dict[str, np.ndarray], at: str, spec: ModelSpec) -> np.ndarray:
    fused = _linear(x, params, f"{at}.linear_qkv")
    d, per = spec.kv_channels, spec.num_attention_heads // spec.num_query_groups
    length = len(x)
    hidden = np.tril(np.ones((length, length), bool))
    if spec.sliding_window:
        hidden &= ~np.tril(np.ones((length, length), bool), -spec.sliding_window)
    heads = []
    for head in range(spec.num_attention_heads):
        block = head // per * (per + 2)
        q, k, v = (
            fused[:, (block + offset) * d : (block + offset + 1) * d] for offset in (head % per, per, per + 1)
        )
        if spec.qk_layernorm:
            q = _norm(q, params, f"{at}.q_layernorm", spec)
            k = _norm(k, params, f"{at}.k_layernorm", spec)
        if spec.position_embedding == "rope":
            q, k = _rotate(q, spec), _rotate(k, spec)
        scores = np.where(hidden, q @ k.T / math.sqrt(d), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v)
    return _linear(np.concatenate(heads, axis=1), params, f"{at}.linear_proj")


def _mlp(x: np.ndarray, params: dict[str, np.ndarray], at: str, spec: ModelSpec) -> np.ndarray:
    inner = _linear(x, params, f"{at}.linear_fc1")
    act = ACTIVATIONS[spec.activation]
    if spec.gated_linear_unit:  # rows alternate gate, up
        inner = act(inner[:, 0::2]) * inner[:, 1::2]
    else:
        inner = act(inner)
    return _linear(inner, params, f"{at}.linear_fc2")


def forward(spec: ModelSpec, params: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits [length, vocab] for token ids [length]."""
    params = {name: value.astype(np.float64) for name, value in params.items()}
    x = params["embedding.word_embeddings.weight"][ids]
    if spec.position_embedding == "learned_absolute":
        x = x + params["embedding.position_embeddings.weight"][: len(ids)]
    for number in range(spec.num_layers):
        at = f"decoder.layers.{number}"
        normed = _norm(x, params, f"{at}.input_layernorm", spec)
        attended = _attention(normed, params, f"{at}.self_attention", spec)
        before_mlp = x if spec.parallel_residual else x + attended
        fed = _mlp(_norm(before_mlp, params, f"{at}.pre_mlp_layernorm", spec), params, f"{at}.mlp", spec)
        x = x + attended + fed
    x = _norm(x, params, "decoder.final_layernorm", spec)
    head = "embedding.word_embeddings.weight" if spec.tie_word_embeddings else "output_layer.weight"
    return x @ params[head].T
