"""Partition dimensions, packings and the ranks' layout, against slices made by hand and mindformers' source."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.errors import MindferryError, UsageError
from mindferry.partition.layout import Grid, Place, check_devices, check_model, parse_grid, ranks, stages_of
from mindferry.partition.rules import cuts, layer_of, rule_of
from mindferry.spec import ModelSpec
from mindferry.weights.target import target_names
from mindferry.weights.transforms import TargetLayout

from ..support import gpt2_spec
from .reference import share


@st.composite
def models(draw: st.DrawFn, mp: int) -> ModelSpec:
    """Specs that `mp` tensor-parallel ranks divide."""
    groups = mp * draw(st.integers(1, 2))
    gated = draw(st.booleans())
    return gpt2_spec(
        vocab_size=mp * draw(st.integers(1, 9)),
        hidden_size=draw(st.integers(1, 9)),
        num_layers=draw(st.integers(1, 4)),
        num_query_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 3)),
        kv_channels=draw(st.integers(1, 5)),
        ffn_hidden_size=mp * draw(st.integers(1, 7)),
        max_position_embeddings=mp * draw(st.integers(1, 5)),
        position_embedding=draw(st.sampled_from(["learned_absolute", "rope"])),
        normalization=draw(st.sampled_from(["LayerNorm", "RMSNorm"])),
        activation="silu" if gated else "gelu_tanh",
        gated_linear_unit=gated,
        add_bias_linear=draw(st.booleans()),
        add_qkv_bias=draw(st.booleans()),
        qk_layernorm=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
    )


layouts = st.builds(
    TargetLayout, st.sampled_from(["per_group", "flat"]), st.sampled_from(["interleaved", "concatenated"])
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shares_are_those_made_by_hand_and_join_to_the_whole(data: st.DataObject) -> None:
    mp = data.draw(st.sampled_from([1, 2, 3, 4]))
    spec, layout = data.draw(models(mp)), data.draw(layouts)
    for name, cut in cuts(spec, layout, mp).items():
        whole = np.arange(int(np.prod(cut.shape)), dtype=np.int64).reshape(cut.shape)
        contiguous = (layout.qkv == "flat") if "qkv" in name else (layout.gate_up == "concatenated")
        joined = np.full_like(whole, -1)
        for rank in range(mp):
            mine = cut.take(whole, rank)
            np.testing.assert_array_equal(mine, share(name, whole, mp, rank, spec, contiguous), err_msg=name)
            assert mine.shape == cut.local_shape
            cut.put(joined, mine, rank)
        np.testing.assert_array_equal(joined, whole, err_msg=name)


def test_every_parameter_of_every_kind_of_network_has_a_rule() -> None:
    kinds = itertools.product([True, False], repeat=4)
    for bias, gated, qk_norm, tied in kinds:
        for norm in ("LayerNorm", "RMSNorm"):
            spec = gpt2_spec(
                add_bias_linear=bias,
                gated_linear_unit=gated,
                activation="silu" if gated else "gelu_tanh",
                qk_layernorm=qk_norm,
                tie_word_embeddings=tied,
                normalization=norm,
            )
            for name in target_names(spec):
                assert rule_of(name).pattern == name.replace(".0.", ".{}.").replace(".1.", ".{}.")


@pytest.mark.parametrize(
    "name",
    ["adam_m.adam_m.output_layer.weight", "decoder.layers.01.mlp.linear_fc1.weight", "lm_head.weight", ""],
)
def test_ghost_names_are_refused(name: str) -> None:
    with pytest.raises(MindferryError, match="no parameter of mindformers"):
        rule_of(name)


def test_moments_are_cut_as_their_parameter() -> None:
    assert rule_of("adam_v.decoder.layers.7.mlp.linear_fc2.weight").dim == 1
    assert layer_of("adam_m.decoder.layers.7.mlp.linear_fc2.weight") == 7


def test_the_ranks_are_where_mindformers_puts_them() -> None:
    """Written out for dp 2, mp 2, pp 2: stages of four consecutive ranks, pairs of consecutive ranks share."""
    grid = Grid(2, 2, 2)
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert [place for _, place in ranks(grid)] == [Place(*p) for p in places]
    assert [grid.rank(*p) for p in places] == list(range(8))
    assert grid.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sorted(grid.data_groups()) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert sorted(grid.pipeline_groups()) == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_groups_cover_every_rank_once(dp: int, mp: int, pp: int) -> None:
    grid = Grid(dp, mp, pp)
    for groups, size in ((grid.tensor_groups(), mp), (grid.data_groups(), dp), (grid.pipeline_groups(), pp)):
        assert sorted(itertools.chain(*groups)) == list(range(grid.ranks))
        assert all(len(group) == size and group == sorted(group) for group in groups)


def test_layers_of_stages() -> None:
    spec = gpt2_spec(num_layers=7)
    assert stages_of(spec, 2, [0, 1]).layers == ((0, 1, 2), (3, 4, 5, 6))
    assert stages_of(spec, 3, [0, 1, 0]).counts() == [2, 3, 2]
    # Two virtual stages: stage 0 has the first and the third quarter.
    assert stages_of(gpt2_spec(num_layers=8), 2, 0, virtual=2).layers == ((0, 1, 4, 5), (2, 3, 6, 7))
    held = stages_of(gpt2_spec(num_layers=4, tie_word_embeddings=True), 2)
    assert held.of("embedding.word_embeddings.weight") == (0, 1)
    assert held.of("adam_m.embedding.word_embeddings.weight") == (0, 1)
    assert held.of("embedding.position_embeddings.weight") == (0,)
    assert held.of("decoder.layers.2.mlp.linear_fc1.bias") == (1,)
    assert held.of("decoder.final_layernorm.gamma") == (1,)
    assert stages_of(gpt2_spec(num_layers=4), 2).of("embedding.word_embeddings.weight") == (0,)


@pytest.mark.parametrize(
    ("changes", "grid", "offset", "words"),
    [
        ({"num_attention_heads": 3, "num_query_groups": 3}, Grid(1, 2, 1), 0, "num_attention_heads 3"),
        ({"num_attention_heads": 4, "num_query_groups": 1}, Grid(1, 2, 1), 0, "num_query_groups 1"),
        ({"ffn_hidden_size": 63}, Grid(1, 2, 1), 0, "ffn_hidden_size 63"),
        ({"vocab_size": 51}, Grid(1, 2, 1), 0, "vocab_size 51"),
        ({"vocab_size": 51, "tie_word_embeddings": True}, Grid(1, 2, 1), 0, "vocab_size 51"),
        ({"max_position_embeddings": 7}, Grid(1, 2, 1), 0, "max_position_embeddings 7"),
        ({"num_layers": 3}, Grid(1, 1, 2), 0, "num_layers 3"),
        ({"num_layers": 3}, Grid(1, 1, 2), [1], "one for each of the 2 stages"),
        ({"num_layers": 3}, Grid(1, 1, 2), [1, 1], "adds up to 2, expected 1"),
        ({"num_layers": 3}, Grid(1, 1, 2), [2, -1], "without a layer"),
        ({"num_layers": 3}, Grid(1, 1, 2), 0.5, "whole numbers"),
        ({"num_layers": 2}, Grid(1, 1, 4), 0, "num_layers 2"),
    ],
)
def test_sizes_that_do_not_divide_name_their_key(
    changes: dict[str, object], grid: Grid, offset: object, words: str
) -> None:
    with pytest.raises(UsageError, match=words.replace("[", r"\[")):
        check_model(gpt2_spec(**changes), grid, offset)


def test_the_product_must_be_the_devices() -> None:
    check_devices(Grid(2, 2, 2), 8)
    with pytest.raises(UsageError, match="2 x 2 x 2 = 8 ranks, found 6 devices"):
        check_devices(Grid(2, 2, 2), 6)


@pytest.mark.parametrize(
    ("text", "grid"),
    [("dp=2,mp=3,pp=4", Grid(2, 3, 4)), ("tp=2", Grid(1, 2, 1)), ("pp=2, dp=1", Grid(1, 1, 2))],
)
def test_strategies_are_read(text: str, grid: Grid) -> None:
    assert parse_grid(text) == grid
    assert parse_grid(str(grid)) == grid


@pytest.mark.parametrize(
    "text", ["", "dp", "dp=0", "dp=-1", "dp=2,dp=2", "mp=2,tp=2", "cp=2", "dp=two", "dp=²", "dp=99999999"]
)
def test_other_strategies_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--to"):
        parse_grid(text)
