"""Layouts against numbers worked out by hand, and the law: backward(forward(x)) is x, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.sources.family import families
from mindferry.spec import ModelSpec
from mindferry.weights.rules import WeightRule, bind
from mindferry.weights.target import symbolic_shapes, target_names
from mindferry.weights.tensor_store import same_bits
from mindferry.weights.transforms import WORDS, Chain, Geometry, SplitGateUp, SplitQKV, TargetLayout


def spec_of(**changes) -> ModelSpec:
    values = {
        "family": "gpt2", "vocab_size": 7, "hidden_size": 4, "num_layers": 1, "num_attention_heads": 4,
        "num_query_groups": 2, "kv_channels": 1, "ffn_hidden_size": 3, "max_position_embeddings": 4,
        "position_embedding": "learned_absolute", "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
        "activation": "gelu_tanh", "add_bias_linear": True, "add_qkv_bias": True, "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})


Q, K, V = np.array([10, 11, 12, 13]), np.array([20, 21]), np.array([30, 31])


def test_case_2_rows_per_group_and_flat() -> None:
    grouped, flat = [10, 11, 20, 30, 12, 13, 21, 31], [10, 11, 12, 13, 20, 21, 30, 31]
    assert SplitQKV("per_group", 4, 2, 1).backward([Q, K, V])[0].tolist() == grouped
    assert SplitQKV("flat", 4, 2, 1).backward([Q, K, V])[0].tolist() == flat
    heads = SplitQKV("per_group", 2, 2, 1).backward([Q[:2], K, V])[0].tolist()
    assert heads == [10, 20, 30, 11, 21, 31]


def test_case_8_biases_are_packed_like_weights() -> None:
    full = SplitQKV("per_group", 2, 2, 1).backward([np.array([1, 2]), np.array([3, 4]), np.array([5, 6])])
    assert full[0].tolist() == [1, 3, 5, 2, 4, 6]
    single = SplitQKV("per_group", 2, 1, 1).backward([np.array([1, 2]), np.array([3]), np.array([5])])
    assert single[0].tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("layout", "q", "k", "v"),
    [
        ("flat", [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]),
        ("head_dim_three", [0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]),
        ("per_group", [0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]),
    ],
)
def test_case_47_layouts_of_megatron_versions(layout, q, k, v) -> None:
    split = SplitQKV(layout, 2, 2, 2)
    weight = np.repeat(np.arange(12)[:, None], 4, axis=1)
    for fused in (weight, weight[:, 0]):
        found = [part.reshape(4, -1)[:, 0].tolist() for part in split.forward([fused])]
        assert found == [q, k, v]
        assert same_bits(split.backward(split.forward([fused]))[0], fused)


def test_gate_up_layouts() -> None:
    gate, up = np.array([1, 2, 3]), np.array([7, 8, 9])
    assert SplitGateUp("interleaved").backward([gate, up])[0].tolist() == [1, 7, 2, 8, 3, 9]
    assert SplitGateUp("concatenated").backward([gate, up])[0].tolist() == [1, 2, 3, 7, 8, 9]


def test_rows_that_are_dropped_and_filled() -> None:
    chain = Chain.of(("skip_two_rows",), Geometry(spec_of()))
    assert chain.source_shapes([(3, 1)]) == [(5, 1)]
    table = np.array([[0.0], [0.0], [7.0], [8.0], [9.0]])
    assert chain.forward([table])[0].tolist() == [[7.0], [8.0], [9.0]]
    assert same_bits(chain.backward(chain.forward([table]))[0], table)


def test_case_9_padding_rows_are_cut_and_put_back() -> None:
    chain = Chain.of(("vocab_rows",), Geometry(spec_of(vocab_size=3), padded_vocab_size=4))
    padded = np.array([[1.0], [2.0], [3.0], [0.0]])
    assert chain.source_shapes([(3, 1)]) == [(4, 1)]
    assert chain.forward([padded])[0].tolist() == [[1.0], [2.0], [3.0]]
    assert same_bits(chain.backward(chain.forward([padded]))[0], padded)


geometries = st.builds(
    lambda groups, repeat, head_dim, hidden, ffn, qkv, gate_up, seed: (
        Geometry(
            spec_of(
                num_attention_heads=groups * repeat,
                num_query_groups=groups,
                kv_channels=head_dim,
                hidden_size=hidden,
                ffn_hidden_size=ffn,
                gated_linear_unit=True,
            ),
            TargetLayout(qkv, gate_up),
        ),
        seed,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 7),
    st.sampled_from(["flat", "per_group"]),
    st.sampled_from(["interleaved", "concatenated"]),
    st.integers(0, 2**32 - 1),
)
WORD_TARGETS = {
    "transpose": ("mlp.linear_fc2.weight",),
    "qkv_flat": ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    "qkv_per_group": ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    "qkv_head_dim_three": ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    "qkv_separate": ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"),
    "gate_up_interleaved": ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"),
    "gate_up_separate": ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"),
    "gate_up_concatenated": ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"),
    # These drop rows; test_rows_that_are_dropped_and_filled has their way back.
    "vocab_rows": (),
    "skip_two_rows": (),
}


@pytest.mark.parametrize("word", sorted(WORDS))
@given(case=geometries)
@settings(max_examples=40, deadline=None)
def test_every_word_is_reversible_and_knows_its_shapes(word: str, case) -> None:
    geometry, seed = case
    if word == "qkv_head_dim_three":  # only ever written without grouped-query attention
        heads = geometry.spec.num_attention_heads
        spec = geometry.spec.model_copy(update={"num_query_groups": heads})
        geometry = Geometry(spec, geometry.layout)
    chain = Chain.of((word,), geometry)
    shapes = target_names(geometry.spec)
    for target in WORD_TARGETS[word]:
        shape = shapes[f"decoder.layers.0.{target}"]
        needed = chain.source_shapes([shape])
        random = np.random.default_rng(seed)
        arrays = [random.integers(0, 2**32, size=s, dtype=np.uint32).view(np.float32) for s in needed]
        (there,) = chain.forward(arrays)
        assert there.shape == shape
        back = chain.backward([there])
        assert len(back) == len(arrays)
        assert all(same_bits(a, b) for a, b in zip(arrays, back, strict=True))
        assert sorted(there.view(np.uint32).reshape(-1)) == sorted(
            np.concatenate([a.reshape(-1).view(np.uint32) for a in arrays])
        )


def test_every_word_has_a_property_test() -> None:
    assert set(WORD_TARGETS) == set(WORDS)


def test_every_family_fills_its_network_once() -> None:
    """Declarations are complete: `bind` raises on a parameter left empty or filled twice."""
    for family in families().values():
        fields = {**spec_of().model_dump(), **family.fixed, "family": family.family}
        for tied in (True, False):
            spec = ModelSpec(**{**fields, "tie_word_embeddings": tied})
            bound = bind(family.weights, family.ignored, Geometry(spec))
            assert [step.target for step in bound.steps] == list(target_names(spec))
            assert len(bound.source_shapes()) == sum(len(step.sources) for step in bound.steps)


def test_target_shapes_match_the_parameter_count() -> None:
    for changes in (
        {},
        {"gated_linear_unit": True},
        {"add_bias_linear": False},
        {"normalization": "RMSNorm"},
    ):
        spec = spec_of(**changes)
        assert sum(int(np.prod(s)) for s in target_names(spec).values()) == spec.num_parameters()
        assert list(symbolic_shapes(spec)) == list(target_names(spec))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"source": "a.{}", "target": "b"}, "all names of a rule have"),
        ({"source": "a", "target": "b", "transform": "turn"}, "unknown transform"),
        ({"source": "a", "target": "b", "if_absent": "zeros"}, "because"),
        ({"source": "a", "target": "b", "colour": "red"}, "Extra inputs"),
    ],
)
def test_a_wrong_rule_is_refused(rule: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightRule(**rule)


def test_a_declaration_with_holes_is_refused() -> None:
    rules = [WeightRule(source="wte.weight", target="embedding.word_embeddings.weight")]
    with pytest.raises(ValueError, match=r"no rule fills embedding.position_embeddings.weight"):
        bind(rules, [], Geometry(spec_of()))
    with pytest.raises(ValueError, match="two rules fill"):
        bind(rules * 2, [], Geometry(spec_of()))
