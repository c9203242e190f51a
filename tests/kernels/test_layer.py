"""The whole-layer kernels against PyTorch in float64: outputs and every gradient."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindferry.errors import MindferryError
from mindferry.kernels import has_bf16
from mindferry.kernels.settings import LayerSettings

from .reference import Case, distance

GPT2 = LayerSettings(hidden_size=96, num_heads=3, num_groups=3, head_dim=32, ffn_hidden_size=200)
LLAMA = LayerSettings(
    hidden_size=80,
    num_heads=4,
    num_groups=2,
    head_dim=24,
    ffn_hidden_size=112,
    activation="silu",
    gated=True,
    rotary_half=12,
    rms=True,
    qkv_bias=False,
    bias=False,
)
QWEN3 = replace(LLAMA, qk_norm=True, eps=1e-6)
NEOX = replace(GPT2, rotary_half=4, parallel_residual=True, activation="gelu_erf")
VARIANTS = {
    "gpt2": (GPT2, 37, 2),
    "gelu_erf": (replace(GPT2, activation="gelu_erf"), 19, 3),
    "relu": (replace(GPT2, activation="relu"), 21, 1),
    "one token": (GPT2, 1, 1),
    "one token, batch": (GPT2, 1, 5),
    "one head": (replace(GPT2, num_heads=1, num_groups=1, head_dim=40), 23, 2),
    "wide heads": (replace(GPT2, num_heads=2, num_groups=2, head_dim=256), 33, 1),
    "several blocks of queries": (GPT2, 301, 1),
    "contiguous qkv": (replace(GPT2, contiguous_qkv=True), 18, 2),
    "no bias": (replace(GPT2, bias=False, qkv_bias=False), 15, 2),
    "llama": (LLAMA, 29, 2),
    "llama, gate first": (replace(LLAMA, interleaved=False), 29, 2),
    "llama, contiguous qkv": (replace(LLAMA, contiguous_qkv=True), 29, 2),
    "qkv bias only": (replace(LLAMA, qkv_bias=True), 17, 1),
    "partial rotary": (replace(LLAMA, rotary_half=5), 17, 1),
    "one key/value head": (replace(LLAMA, num_groups=1), 140, 2),
    "groups enough for the threads": (replace(LLAMA, num_heads=8, num_groups=4), 20, 5),
    "qwen3": (QWEN3, 29, 2),
    "qwen3, one token": (QWEN3, 1, 3),
    "qwen3, contiguous qkv": (replace(QWEN3, contiguous_qkv=True), 31, 1),
    "qwen3, one key/value head": (replace(QWEN3, num_groups=1, head_dim=7, rotary_half=3), 150, 2),
    "neox": (NEOX, 27, 2),
    "neox, one token": (NEOX, 1, 1),
    "neox, grouped and odd": (replace(NEOX, num_heads=6, num_groups=2, head_dim=13, rotary_half=3), 33, 3),
    "neox, several blocks of queries": (NEOX, 301, 1),
    "both": (replace(QWEN3, parallel_residual=True), 21, 2),
    "both, LayerNorm": (replace(NEOX, qk_norm=True), 21, 2),
}


def check(case, lib, tolerance, chosen=None):
    y, grads = case.run(lib, chosen)
    expected_y, expected = case.expected()
    assert distance(y, expected_y) < tolerance
    for name, found, wanted in zip(["x", *case.s.parameter_shapes()], grads, expected, strict=True):
        # A key's bias has no influence on a softmax, nor have query and key of one token: where the true gradient
        # is 0 the scale is the rest's. A head norm's gamma sums the rounding of all tokens and heads.
        least = 0.1 if name.endswith(("q_layernorm.weight", "k_layernorm.weight")) else 1e-3
        scale = max(np.linalg.norm(wanted), least * np.linalg.norm(expected[0]))
        assert np.linalg.norm(found - wanted) / scale < tolerance, name


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_matches_float64_reference(lib, name):
    s, seq, batch = VARIANTS[name]
    check(Case(s, seq, batch), lib, 2e-5)


@pytest.mark.skipif(not has_bf16(), reason="this CPU has no bfloat16 products")
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "several blocks of queries", "one token", "one key/value head", "qwen3", "neox"]
)
def test_bfloat16_is_within_its_rounding(lib, name):
    s, seq, batch = VARIANTS[name]
    # 8 bits of mantissa: 2^-8 a rounding, a handful of roundings on the way.
    check(Case(replace(s, bf16=True), seq, batch), lib, 2e-2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(lib, data):
    draw = data.draw
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dim = draw(st.integers(2, 40))
    s = LayerSettings(
        # Two or three columns may lie so near each other that their norm amplifies float32's rounding a hundredfold.
        hidden_size=draw(st.integers(8, 70)),
        num_heads=groups * per_group,
        num_groups=groups,
        head_dim=dim,
        ffn_hidden_size=draw(st.integers(1, 90)),
        activation=draw(st.sampled_from(["gelu_tanh", "gelu_erf", "silu"])),
        gated=draw(st.booleans()),
        interleaved=draw(st.booleans()),
        contiguous_qkv=draw(st.booleans()),
        rotary_half=draw(st.integers(0, dim // 2)),
        rms=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        bias=draw(st.booleans()),
        recompute_attention=draw(st.booleans()),
        recompute_mlp=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        parallel_residual=draw(st.booleans()),
    )
    check(Case(s, draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(0, 99))), lib, 1e-4)


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_tiny_and_huge_activations(lib, scale):
    check(Case(GPT2, 20, 2, scale=scale), lib, 1e-4)


@pytest.mark.parametrize(
    "bf16", [False, pytest.param(True, marks=pytest.mark.skipif(not has_bf16(), reason="-"))]
)
@pytest.mark.parametrize("parts", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("base", [GPT2, QWEN3, NEOX], ids=["gpt2", "qwen3", "neox"])
def test_recompute_changes_memory_and_nothing_else(lib, parts, bf16, base):
    s = replace(base, bf16=bf16)
    case = Case(s, 40, 2)
    y, grads = case.run(lib)
    again = replace(s, recompute_attention=parts[0], recompute_mlp=parts[1])
    y2, grads2 = case.run(lib, again)
    assert np.array_equal(y, y2)
    for a, b in zip(grads, grads2, strict=True):
        assert np.array_equal(a, b)
    before, after = (lib.kept_bytes(x.packed(), 1024, 4) for x in (s, again))
    assert after < before
    if all(parts):
        # Everything kept for a layer, its input included.
        stays = 4 * 1024 * 4 * s.hidden_size
        assert after + stays < 0.5 * (before + stays)


@pytest.mark.parametrize("s", [GPT2, QWEN3, NEOX], ids=["gpt2", "qwen3", "neox"])
def test_same_result_with_any_number_of_threads(lib, s):
    case = Case(s, 70, 3)
    threads = lib.threads()
    _, many = case.run(lib)
    try:
        lib.set_threads(1)
        _, one = case.run(lib)
    finally:
        lib.set_threads(threads)
    for a, b in zip(many, one, strict=True):
        assert distance(a, b) < 1e-6


@pytest.mark.parametrize("base", [GPT2, NEOX], ids=["gpt2", "neox"])
def test_dropout_gradient_belongs_to_its_mask(lib, base):
    s = replace(base, attention_dropout=0.2, hidden_dropout=0.3)
    case = Case(s, 24, 2)

    def forward():
        lib.set_seed(5)
        return case.run(lib)

    y, grads = forward()
    assert np.array_equal(y, forward()[0])
    lib.set_seed(6)
    assert not np.array_equal(y, case.run(lib)[0])
    way = np.random.default_rng(9).normal(0, 1, case.x.shape).astype(np.float32)
    x, step, losses = case.x, np.float32(4e-3), []
    for sign in (1, -1):
        case.x = x + sign * step * way
        losses.append(float((forward()[0].astype(np.float64) * case.dy).sum()))
    slope = (losses[0] - losses[1]) / (2 * float(step))
    assert abs(slope - float((grads[0] * way).sum())) < 5e-3 * float(np.linalg.norm(grads[0]))


def test_dropout_keeps_the_mean_and_drops_its_share(lib):
    s = LayerSettings(8, 1, 1, 8, 8, hidden_dropout=0.25)
    case = Case(s, 4000, 1)
    for p in case.params:
        p[:] = 0.0
    case.params[-1][:] = 1.0  # the MLP's output is its bias, 1 everywhere
    lib.set_seed(1)
    y, _ = case.run(lib)
    branch = (y - case.x).round(4)
    assert set(np.unique(branch)) == {np.float32(0.0), np.float32(round(1 / 0.75, 4))}
    assert abs(float((branch == 0).mean()) - 0.25) < 0.01


def test_nan_stays_visible(lib):
    case = Case(GPT2, 9, 2)
    case.x[4, 1, 3] = np.nan
    y, grads = case.run(lib)
    assert np.isnan(y[4:, 1]).all()
    assert not np.isnan(y[:, 0]).any()  # the other sequence is untouched
    assert np.isnan(grads[3]).any()


def test_wrong_arguments_are_refused(lib):
    case = Case(GPT2, 5, 2)
    case.x = case.x.astype(np.float64)
    with pytest.raises(MindferryError, match="hidden_states: found float64, expected float32"):
        case.run(lib)
    case = Case(GPT2, 5, 2)
    case.params[2] = case.params[2][:-1]
    with pytest.raises(
        MindferryError, match=r"linear_qkv.weight: found shape \[287, 96\], expected \[288, 96\]"
    ):
        case.run(lib)
    case = Case(GPT2, 5, 2)
    case.x = case.x[:, :0]
    with pytest.raises(MindferryError, match="empty tensor"):
        case.run(lib)
    case = Case(GPT2, 5, 2)
    with pytest.raises(MindferryError, match="does not divide"):
        case.run(lib, replace(GPT2, num_groups=2))
    case.x = case.x.transpose(1, 0, 2)
    with pytest.raises(ValueError, match="contiguous"):
        case.run(lib)
