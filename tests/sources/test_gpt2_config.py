"""config.json of GPT-2: each key is carried, checked, dropped with a reason, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.sources.config_json import ConfigReading, read_config
from mindferry.sources.family import common, families, family_of
from mindferry.sources.names import CanonicalStore, canonical
from mindferry.weights import MemoryStore

BASE = {"model_type": "gpt2", "vocab_size": 100, "n_embd": 12, "n_head": 3, "n_layer": 2,
        "n_positions": 8, "bos_token_id": 99, "eos_token_id": 99}  # fmt: skip


def read(**changes) -> ConfigReading:
    tree = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    return read_config(tree, families()["gpt2"], common(), "config.json")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu", "gelu_erf"),
        ("relu", "relu"),
        ("silu", "silu"),
        ("swish", "silu"),
    ],
)
def test_case_10_each_activation_names_one_function(name: str, meant: str) -> None:
    assert read(activation_function=name).spec.activation == meant


@pytest.mark.parametrize("name", ["quick_gelu", "gelu_10", "tanh", "laplace", "GELU", ""])
def test_unknown_activation_is_an_error(name: str) -> None:
    with pytest.raises(MindferryError, match=r"activation_function.*not supported; known: gelu_new"):
        read(activation_function=name)


@pytest.mark.parametrize(("inner", "size"), [("absent", 48), (None, 48), (20, 20), (31, 31)])
def test_case_14_inner_size(inner: object, size: int) -> None:
    reading = read(n_inner=inner)
    assert reading.spec.ffn_hidden_size == size
    (decision,) = [item for item in reading.decisions if item.target_key == "ffn_hidden_size"]
    assert ("4 x hidden_size" in decision.note) == (inner in ("absent", None))


def test_values_are_carried() -> None:
    spec = read(
        layer_norm_epsilon=3e-6, embd_pdrop=0.0, resid_pdrop=0.25, attn_pdrop=0.5, initializer_range=0.01
    ).spec
    assert spec.layernorm_epsilon == 3e-6
    assert (spec.embedding_dropout, spec.hidden_dropout, spec.attention_dropout) == (0.0, 0.25, 0.5)
    assert spec.init_method_std == 0.01
    assert (spec.bos_token_id, spec.eos_token_id) == (99, 99)
    assert spec.max_position_embeddings == 8
    assert (spec.kv_channels, spec.num_query_groups) == (4, 3)


def test_defaults_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Config()
    for name, key in families()["gpt2"].config.items():
        assert key.default == getattr(theirs, name), name


def test_every_key_of_a_real_config_is_accounted_for() -> None:
    transformers = pytest.importorskip("transformers")
    tree = json.loads(
        transformers.GPT2Config(architectures=["GPT2LMHeadModel"]).to_json_string(use_diff=False)
    )
    reading = read_config(tree, families()["gpt2"], common(), "config.json")
    assert {item.source_key for item in reading.decisions} >= set(tree)
    assert reading.warnings == []
    assert all(item.note for item in reading.decisions if not item.target_key)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale_attn_weights": False}, "sqrt"),
        ({"scale_attn_by_inverse_layer_idx": True}, "layer number"),
        ({"add_cross_attention": True}, "cross-attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unquantized"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "never executed"),
        ({"pruned_heads": {"0": [1]}}, "fewer heads"),
        ({"scale_attn_weights": 1}, "sqrt"),
    ],
)
def test_what_would_change_the_numbers_is_refused(change: dict, reason: str) -> None:
    with pytest.raises(MindferryError, match=reason) as caught:
        read(**change)
    assert next(iter(change)) in str(caught.value)


def test_upcast_changes_nothing_and_says_so() -> None:
    (item,) = [
        d for d in read(reorder_and_upcast_attn=True).decisions if d.source_key == "reorder_and_upcast_attn"
    ]
    assert "float32" in item.note


def test_unknown_key_is_a_warning_with_the_nearest_name() -> None:
    reading = read(n_postions=9)
    assert "'n_postions' is unknown" in reading.warnings[0]
    assert "'n_positions'" in reading.warnings[0]
    assert [d.note for d in reading.decisions if d.source_key == "n_postions"]


def test_aliases_must_agree() -> None:
    assert read(n_embd="absent", hidden_size=24).spec.hidden_size == 24
    assert read(hidden_size=12).spec.hidden_size == 12
    with pytest.raises(MindferryError, match="n_embd = 12 and hidden_size = 24"):
        read(hidden_size=24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": "2"}, "n_layer: found '2', expected int"),
        ({"n_layer": True}, "n_layer: found True, expected int"),
        ({"n_layer": 2.0}, "n_layer: found 2.0, expected int"),
        ({"n_layer": 0}, "num_layers"),
        ({"n_head": 5}, "hidden_size 12 is not a multiple of num_attention_heads 5"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon"),
        ({"layer_norm_epsilon": 0}, "layernorm_epsilon"),
        ({"attn_pdrop": 1.0}, "attention_dropout"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"vocab_size": None}, "vocab_size is null"),
    ],
)
def test_wrong_values_are_named(change: dict, message: str) -> None:
    with pytest.raises(MindferryError, match=message):
        read(**change)


def test_all_problems_at_once() -> None:
    with pytest.raises(MindferryError) as caught:
        read(n_layer="2", activation_function="x", scale_attn_weights=False)
    assert all(word in str(caught.value) for word in ("n_layer", "activation_function", "scale_attn_weights"))


@pytest.mark.parametrize("found", ["gpt5", None, 3, ["gpt2"]])
def test_another_family_names_what_is_supported(found: object) -> None:
    with pytest.raises(MindferryError, match=r"config.json: .*model_type.*supported: .*gpt2"):
        family_of(found, "config.json")


class TestDirectory:
    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"no config.json"):
            open_source(tmp_path)

    def test_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="does not exist"):
            open_source(tmp_path / "x")

    @pytest.mark.parametrize(
        "text", ["", "[]", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "\udcff"]
    )
    def test_config_that_is_none(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(MindferryError, match=r"config.json: cannot be read"):
            open_source(tmp_path)

    def test_no_weights(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(BASE))
        with pytest.raises(UsageError, match="no weights"):
            open_source(tmp_path)
        save_file({"a": np.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
        with pytest.raises(UsageError, match=r"found model-00001-of-00002.safetensors but no .*index"):
            open_source(tmp_path)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("module._orig_mod.transformer.wte.weight", "transformer.wte.weight"),
            ("_orig_mod.module.transformer.wpe.weight", "transformer.wpe.weight"),
            ("_orig_mod._orig_mod.module.x", "x"),
            ("transformer.h.0.module.weight", "transformer.h.0.module.weight"),
        ],
    )
    def test_case_4_wrappers_go_only_at_the_front(self, name: str, expected: str) -> None:
        assert canonical(name) == expected

    def test_case_4_collision(self) -> None:
        unequal = MemoryStore.of_arrays({"module.x": np.array([1.0]), "x": np.array([2.0])})
        with pytest.raises(MindferryError, match=r"module.x and x both mean x"):
            CanonicalStore(unequal)
        equal = CanonicalStore(MemoryStore.of_arrays({"module.x": np.array([1.0]), "x": np.array([1.0])}))
        assert equal.names() == ["x"]
        assert "repeats" in equal.warnings[0]
