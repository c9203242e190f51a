"""Every family against transformers: random small models of awkward sizes, same logits, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindferry.errors import MindferryError
from mindferry.sources import open_source
from mindferry.sources.config_json import read_config
from mindferry.sources.family import common, families
from mindferry.sources.rope import rope_scaling_json
from mindferry.weights import TargetLayout, convert, target_names

from .reference import forward, inverse_frequencies

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA_LIKE = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
NEOX = {k: v for k, v in LLAMA_LIKE.items() if k != "num_key_value_heads"} | {"num_attention_heads": 3}
OPT = {k: v for k, v in NEOX.items() if k != "intermediate_size"} | {"ffn_dim": 37, "pad_token_id": 1}
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

GPT2 = {"vocab_size": 67, "n_positions": 64, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 37,
        "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip

CASES = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", LLAMA_LIKE),
    "llama-head_dim": ("Llama", {**LLAMA_LIKE, "head_dim": 10, "rms_norm_eps": 1e-3}),
    "llama-one-kv-head-tied": (
        "Llama",
        {**LLAMA_LIKE, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "llama-biases": ("Llama", {**LLAMA_LIKE, "attention_bias": True, "mlp_bias": True}),
    "llama-theta": ("Llama", {**LLAMA_LIKE, "rope_theta": 1e6}),
    "llama-llama3": ("Llama", {**LLAMA_LIKE, "rope_theta": 5e5, "rope_scaling": LLAMA3, "head_dim": 32}),
    "llama-linear": ("Llama", {**LLAMA_LIKE, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-dynamic": ("Llama", {**LLAMA_LIKE, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-yarn": ("Llama", {**LLAMA_LIKE, "rope_scaling": YARN, "head_dim": 16}),
    "llama-yarn-all": (
        "Llama",
        {
            **LLAMA_LIKE,
            "head_dim": 32,
            "rope_scaling": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
        },
    ),
    "mistral": ("Mistral", {**LLAMA_LIKE, "sliding_window": 4096}),
    "mistral-window-below-length": ("Mistral", {**LLAMA_LIKE, "sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2", LLAMA_LIKE),
    "qwen2-tied": ("Qwen2", {**LLAMA_LIKE, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen3": ("Qwen3", {**LLAMA_LIKE, "head_dim": 12}),
    "qwen3-default-head_dim": ("Qwen3", {**LLAMA_LIKE, "num_hidden_layers": 1}),
    "gpt_neox": ("GPTNeoX", NEOX),
    "gpt_neox-serial": ("GPTNeoX", {**NEOX, "use_parallel_residual": False, "rotary_pct": 1.0}),
    "gpt_neox-tanh": ("GPTNeoX", {**NEOX, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3,
                                  "hidden_size": 48, "rotary_pct": 0.5, "rotary_emb_base": 500}),
    "opt": ("OPT", OPT),
    "opt-gelu-untied": ("OPT", {**OPT, "activation_function": "gelu", "tie_word_embeddings": False}),
}  # fmt: skip
IDS = np.random.default_rng(5).integers(2, 67, 48)


def build(path: Path, case: str, **changes):
    """A random model of `case`, every parameter (biases and norms too) away from its initial value."""
    name, values = CASES[case]
    values = {**values, **changes}
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**json.loads(json.dumps(values)))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return model


def logits_of(model) -> np.ndarray:
    with torch.no_grad():
        return model.double()(torch.tensor(IDS[None])).logits[0].numpy()


def converted(path: Path, case: str, out: str = "out"):
    model = build(path / "src", case)
    source = open_source(path / "src")
    convert(source, path / out)
    return model, source, load_file(path / out / "model.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path: Path, case: str) -> None:
    model, source, params = converted(tmp_path, case)
    assert source.family == case.split("-")[0]
    assert source.warnings == []
    assert {name: value.shape for name, value in params.items()} == target_names(source.spec)
    expected = logits_of(model)
    # Rotary tables, RMSNorm and softmax stay in float32 in transformers even when the model is float64.
    tolerance = 1e-5 * max(1, np.abs(expected).max())
    np.testing.assert_allclose(forward(source.spec, params, IDS), expected, rtol=0, atol=tolerance)
    count = sum(int(np.prod(shape)) for shape in target_names(source.spec).values())
    assert count == source.spec.num_parameters()
    dropped_rows = 2 * source.spec.hidden_size if source.family == "opt" else 0
    assert count == model.num_parameters() - dropped_rows


def rows(params: dict, name: str, order: list[int], axis_shape: tuple[int, ...]) -> None:
    blocks = params[name].reshape(*axis_shape, *params[name].shape[1:])
    params[name] = np.ascontiguousarray(blocks[:, order]).reshape(params[name].shape)


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def wrong_group_order(spec, params):
    g, d, per = spec.num_query_groups, spec.kv_channels, spec.num_attention_heads // spec.num_query_groups
    rows(params, QKV, [*range(per), per + 1, per], (g, per + 2, d))
    return spec


def wrong_rope_pairing(spec, params):
    """Neighbouring channels in place of halves, as the original Llama files have them."""
    d = spec.kv_channels
    order = np.arange(d).reshape(2, d // 2).T.reshape(-1).tolist()
    rows(params, QKV, order, (params[QKV].shape[0] // d, d))
    return spec


def wrong_gate_up(spec, params):
    params[FC1] = params[FC1].reshape(-1, 2, params[FC1].shape[1])[:, ::-1].reshape(params[FC1].shape)
    return spec


def concatenated_gate_up(spec, params):
    params[FC1] = np.concatenate([params[FC1][0::2], params[FC1][1::2]])
    return spec


def wrong_theta(spec, params):
    return spec.model_copy(update={"rotary_base": spec.rotary_base * 10})


def no_scaling(spec, params):
    return spec.model_copy(update={"rope_scaling": None})


def swapped_qk_norms(spec, params):
    q, k = (f"decoder.layers.0.self_attention.{n}_layernorm.weight" for n in "qk")
    params[q], params[k] = params[k], params[q]
    return spec


def without_qk_norm(spec, params):
    return spec.model_copy(update={"qk_layernorm": False})


def wrong_epsilon(spec, params):
    return spec.model_copy(update={"layernorm_epsilon": 1e-2})


def serial(spec, params):
    return spec.model_copy(update={"parallel_residual": not spec.parallel_residual})


def shifted_positions(spec, params):
    name = "embedding.position_embeddings.weight"
    params[name] = np.roll(params[name], 1, axis=0)
    return spec


def no_window(spec, params):
    return spec.model_copy(update={"sliding_window": None})


CONTROLS = [
    *[(family, fault) for family in ("llama", "mistral", "qwen2", "qwen3") for fault in
      (wrong_group_order, wrong_rope_pairing, wrong_gate_up, concatenated_gate_up, wrong_theta,
       wrong_epsilon)],
    ("qwen3", swapped_qk_norms), ("qwen3", without_qk_norm), ("llama-llama3", no_scaling),
    ("llama-yarn", no_scaling), ("llama-linear", no_scaling), ("mistral-window-below-length", no_window),
    ("gpt_neox", wrong_group_order), ("gpt_neox-tanh", wrong_theta), ("gpt_neox", serial),
    ("gpt_neox", wrong_epsilon), ("opt", shifted_positions), ("opt", wrong_group_order),
]  # fmt: skip


@pytest.mark.parametrize(("case", "fault"), CONTROLS, ids=lambda value: getattr(value, "__name__", value))
def test_negative_controls(tmp_path: Path, case: str, fault) -> None:
    """Each fault must show: otherwise the comparison above would prove nothing."""
    model, source, params = converted(tmp_path, case)
    spec = fault(source.spec, params)
    expected = logits_of(model)
    difference = np.abs(forward(spec, params, IDS) - expected).max()
    assert difference > 1e-3 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_layouts_hold_the_same_rows_in_another_order(tmp_path: Path, case: str) -> None:
    _, _, params = converted(tmp_path, case)
    other = open_source(tmp_path / "src", layout=TargetLayout("flat", "concatenated"))
    convert(other, tmp_path / "other")
    theirs = load_file(tmp_path / "other/model.safetensors")
    original = load_file(tmp_path / "src/model.safetensors")
    prefix = "model.layers.0.self_attn"
    expected = np.concatenate([original[f"{prefix}.{name}_proj.weight"] for name in "qkv"])
    np.testing.assert_array_equal(theirs[QKV], expected)
    expected = np.concatenate([original[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    np.testing.assert_array_equal(theirs[FC1], expected)
    assert other.rules.geometry.layout.config() == {
        "use_contiguous_weight_layout_attention": True,
        "use_interleaved_weight_layout_mlp": False,
    }
    assert sorted(params[QKV].reshape(-1)) == sorted(theirs[QKV].reshape(-1))


def config_of(family: str, **values):
    tree = {**LLAMA_LIKE, "model_type": family, **values}
    return read_config(tree, families()[family], common(), "config.json")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"])
def test_defaults_equal_those_of_transformers(family: str) -> None:
    theirs = transformers.AutoConfig.for_model(family)
    for name, key in families()[family].config.items():
        if key.when_null is None:
            assert key.default == getattr(theirs, name, None), name


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox", "opt"])
def test_every_key_of_a_full_config_is_accounted_for(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, architectures=["X"])
    tree = json.loads(config.to_json_string(use_diff=False))
    if family == "qwen2" or family == "qwen3":
        assert set(tree["layer_types"]) == {"full_attention"}
    reading = read_config(tree, families()[family], common(), "config.json")
    assert reading.warnings == []
    assert {item.source_key for item in reading.decisions} >= set(tree)


class TestConfig:
    def test_case_11_epsilon_is_carried_or_the_family_default_stated(self) -> None:
        assert config_of("llama", rms_norm_eps=1e-5).spec.layernorm_epsilon == 1e-5
        reading = config_of("llama")
        assert reading.spec.layernorm_epsilon == 1e-6
        (item,) = [d for d in reading.decisions if d.target_key == "layernorm_epsilon"]
        assert "default" in item.note

    def test_case_12_theta(self) -> None:
        assert config_of("llama", rope_theta=5e5).spec.rotary_base == 5e5
        assert config_of("llama").spec.rotary_base == 1e4
        nested = {"rope_theta": 5e5, **LLAMA3}
        spec = config_of("llama", rope_parameters=nested).spec
        assert spec.rotary_base == 5e5
        assert rope_scaling_json(spec.rope_scaling) == LLAMA3
        plain = config_of("llama", rope_parameters={"rope_theta": 7e5, "rope_type": "default"}).spec
        assert (plain.rotary_base, plain.rope_scaling) == (7e5, None)
        with pytest.raises(MindferryError, match=r"rope_theta.*differ"):
            config_of("llama", rope_theta=1e4, rope_parameters={"rope_theta": 5e5})
        for base, expected in (
            (1e4, [1, 1e-1, 1e-2, 1e-3]),
            (5e5, [1, 3.760603e-2, 1.414214e-3, 5.318296e-5]),
        ):
            spec = config_of("llama", head_dim=8, rope_theta=base).spec
            np.testing.assert_allclose(inverse_frequencies(spec, 4)[0], expected, rtol=1e-6)

    @pytest.mark.parametrize(
        ("values", "q_rows", "fused_rows"),
        [
            (
                {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
                4096,
                6144,
            ),
            (
                {"hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
                8192,
                10240,
            ),
            (
                {"hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": None},
                768,
                2304,
            ),
        ],
    )
    def test_case_13_head_size(self, values: dict, q_rows: int, fused_rows: int) -> None:
        spec = config_of("llama", **values).spec
        shapes = target_names(spec)
        assert shapes[QKV] == (fused_rows, values["hidden_size"])
        assert shapes["decoder.layers.0.self_attention.linear_proj.weight"] == (values["hidden_size"], q_rows)

    def test_case_13_without_a_head_size_it_must_divide(self) -> None:
        with pytest.raises(MindferryError, match="hidden_size 25 is not a multiple"):
            config_of("llama", hidden_size=25)

    def test_case_45_scaling_is_kept_exactly(self) -> None:
        given = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0, "high_freq_factor": 6.0,
                 "original_max_position_embeddings": 2048}  # fmt: skip
        assert rope_scaling_json(config_of("llama", rope_scaling=given).spec.rope_scaling) == given

    @pytest.mark.parametrize(
        ("scaling", "message"),
        [
            ({"rope_type": "longrope", "factor": 2.0}, "'longrope' is not supported"),
            ({"factor": 2.0}, "rope_type is missing"),
            ({"rope_type": "linear"}, "linear needs factor"),
            ({"rope_type": "linear", "factor": "2"}, "factor: found '2'"),
            ({"rope_type": "linear", "factor": -2.0}, "positive"),
            ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "linear has no beta_fast"),
            ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "'linear' and 'yarn'"),
            ({"rope_type": "llama3", "factor": 2.0}, "llama3 needs high_freq_factor"),
            ("linear", "expected a table"),
        ],
    )
    def test_scaling_that_cannot_be_kept(self, scaling: object, message: str) -> None:
        with pytest.raises(MindferryError, match=message):
            config_of("llama", rope_scaling=scaling)

    @pytest.mark.parametrize(
        ("family", "values", "message"),
        [
            ("llama", {"attention_bias": True}, "attention_bias = true.*one switch"),
            ("llama", {"mlp_bias": True}, "attention_bias = false.*one switch"),
            ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
            ("llama", {"num_key_value_heads": 4}, "num_query_groups"),
            ("qwen2", {"use_sliding_window": True}, "max_window_layers"),
            ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
            ("qwen3", {"attention_bias": True}, "attention_bias"),
            ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
            ("gpt_neox", {"attention_bias": False}, "attention_bias"),
            ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
            ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim"),
            ("opt", {"layerdrop": 0.1}, "layerdrop"),
        ],
    )
    def test_what_cannot_be_kept_is_refused(self, family: str, values: dict, message: str) -> None:
        if family in ("gpt_neox", "opt"):
            values = {"num_attention_heads": 3, **values}
        with pytest.raises(MindferryError, match=message):
            config_of(family, **values)

    def test_several_end_tokens(self) -> None:
        reading = config_of("llama", eos_token_id=[3, 5])
        assert reading.spec.eos_token_id == 3
        assert "eos_token_id lists [3, 5]" in reading.warnings[0]


def test_case_8_biases_of_a_model_without_them_are_surplus(tmp_path: Path) -> None:
    build(tmp_path / "src", "qwen2")
    config = tmp_path / "src/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llama"}))
    with pytest.raises(MindferryError, match=r"6 surplus: layers.0.self_attn.k_proj.bias"):
        open_source(tmp_path / "src")
