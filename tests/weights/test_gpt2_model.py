"""GPT-2 directories written by transformers: same logits from the converted weights, nothing guessed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.errors import MindferryError
from mindferry.sources import open_source
from mindferry.sources.family import families
from mindferry.weights import convert, target_names

from .reference import ACTIVATIONS, forward

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 61, "n_positions": 19, "n_embd": 24, "n_layer": 2, "n_head": 3}


def make_gpt2(path: Path, **changes):
    """Write a random GPT-2 whose every parameter (biases and norms too) differs from its initial value."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**SMALL, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return model


def logits_of(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.double()(torch.tensor(ids[None])).logits[0].numpy()


IDS = np.array([5, 60, 0, 17, 17, 3, 42, 8, 9, 1, 33, 59, 2, 4, 7, 11, 13, 21, 30])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_layer": 1, "activation_function": "gelu"},
        {"n_inner": 40, "tie_word_embeddings": False},
        {"activation_function": "relu", "layer_norm_epsilon": 1e-3},
        {"activation_function": "gelu_fast", "n_head": 1},
        {"activation_function": "silu", "n_embd": 28, "n_head": 4},
    ],
    ids=lambda changes: "-".join(f"{k}={v}" for k, v in changes.items()) or "plain",
)
def test_logits_equal_transformers(tmp_path: Path, changes: dict) -> None:
    model = make_gpt2(tmp_path / "src", **changes)
    source = open_source(tmp_path / "src")
    report = convert(source, tmp_path / "out")
    params = load_file(tmp_path / "out/model.safetensors")
    assert {name: value.shape for name, value in params.items()} == target_names(source.spec)
    expected = logits_of(model, IDS)
    np.testing.assert_allclose(forward(source.spec, params, IDS), expected, rtol=0, atol=1e-10)
    assert len({row.source for row in report.used}) == len(source.tensors.names()) - len(report.ignored)


def test_parameter_count_is_the_models_own(tmp_path: Path) -> None:
    model = make_gpt2(tmp_path / "src", n_inner=50)
    spec = open_source(tmp_path / "src").spec
    assert sum(int(np.prod(shape)) for shape in target_names(spec).values()) == model.num_parameters()
    assert spec.num_parameters() == model.num_parameters()


@pytest.mark.parametrize("swap", ["k_and_v", "square_matrix", "activation"])
def test_reference_notices_a_wrong_conversion(tmp_path: Path, swap: str) -> None:
    """A check that cannot fail proves nothing."""
    model = make_gpt2(tmp_path / "src")
    source = open_source(tmp_path / "src")
    convert(source, tmp_path / "out")
    params, spec = load_file(tmp_path / "out/model.safetensors"), source.spec
    if swap == "k_and_v":
        name = "decoder.layers.0.self_attention.linear_qkv.weight"
        by_head = params[name].reshape(3, 3, 8, 24)
        params[name] = by_head[:, [0, 2, 1]].reshape(72, 24)
    elif swap == "square_matrix":
        name = "decoder.layers.1.self_attention.linear_proj.weight"
        params[name] = params[name].T
    else:
        spec = spec.model_copy(update={"activation": "gelu_erf"})
    assert np.abs(forward(spec, params, IDS) - logits_of(model, IDS)).max() > 1e-4


def test_case_46_names_with_and_without_prefix_give_the_same(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "full").transformer.save_pretrained(tmp_path / "bare")
    assert "wte.weight" in load_file(tmp_path / "bare/model.safetensors")
    for name in ("full", "bare"):
        convert(open_source(tmp_path / name), tmp_path / f"{name}-out")
    full, bare = (load_file(tmp_path / f"{name}-out/model.safetensors") for name in ("full", "bare"))
    assert full.keys() == bare.keys()
    assert all(np.array_equal(full[name], bare[name]) for name in full)


def test_case_1_conv1d_is_transposed_by_name() -> None:
    from mindferry.weights.rules import bind
    from mindferry.weights.transforms import Geometry

    rules = {rule.target: rule for rule in families()["gpt2"].weights}
    transposed = {rule.source[0] for rule in rules.values() if "transpose" in rule.transform}
    assert transposed == {
        "h.{}.attn.c_attn.weight",
        "h.{}.attn.c_proj.weight",
        "h.{}.mlp.c_fc.weight",
        "h.{}.mlp.c_proj.weight",
    }
    spec = _tiny_spec(
        hidden_size=2, num_attention_heads=1, kv_channels=2, num_query_groups=1, ffn_hidden_size=3
    )
    family = families()["gpt2"]
    steps = {step.target: step for step in bind(family.weights, family.ignored, Geometry(spec)).steps}
    fc = steps["decoder.layers.0.mlp.linear_fc1.weight"].chain.forward([np.array([[1, 2, 3], [4, 6, 9.0]])])[
        0
    ]
    np.testing.assert_array_equal(fc, [[1, 4], [2, 6], [3, 9]])
    np.testing.assert_array_equal(fc @ [1, -1], [-3, -4, -6])
    proj = steps["decoder.layers.0.self_attention.linear_proj.weight"].chain.forward(
        [np.array([[1, 2], [3, 4.0]])]
    )
    np.testing.assert_array_equal(proj[0], [[1, 3], [2, 4]])
    np.testing.assert_array_equal(proj[0] @ [1, 0], [1, 2])


def _tiny_spec(**changes):
    from mindferry.spec import ModelSpec

    values = {
        "family": "gpt2", "vocab_size": 3, "hidden_size": 4, "num_layers": 1, "num_attention_heads": 2,
        "num_query_groups": 2, "kv_channels": 2, "ffn_hidden_size": 8, "max_position_embeddings": 4,
        "position_embedding": "learned_absolute", "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
        "activation": "gelu_tanh", "add_bias_linear": True, "add_qkv_bias": True, "tie_word_embeddings": True,
    }  # fmt: skip
    return ModelSpec(**{**values, **changes})


def rewrite(path: Path, change) -> None:
    """Apply `change` to the tensors of the directory's model.safetensors."""
    tensors = {name: value.copy() for name, value in load_file(path / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def set_config(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class TestTiedHead:
    """Case 3: the flag and the tensors must agree."""

    @staticmethod
    def with_head(path: Path, factor: float | None, tied: bool) -> Path:
        make_gpt2(path)
        set_config(path, tie_word_embeddings=tied)
        if factor is not None:

            def add(tensors):
                tensors["lm_head.weight"] = tensors["transformer.wte.weight"] * np.float32(factor)

            rewrite(path, add)
        return path

    def test_tied_without_head(self, tmp_path: Path) -> None:
        source = open_source(self.with_head(tmp_path / "s", None, True))
        convert(source, tmp_path / "out")
        assert "output_layer.weight" not in load_file(tmp_path / "out/model.safetensors")

    def test_tied_with_equal_head(self, tmp_path: Path) -> None:
        report = convert(open_source(self.with_head(tmp_path / "s", 1.0, True)), tmp_path / "out")
        assert [row["source"] for row in report.ignored] == ["lm_head.weight"]
        assert "output_layer.weight" not in load_file(tmp_path / "out/model.safetensors")

    @pytest.mark.parametrize("factor", [0.0, 1.5])
    def test_tied_with_another_head(self, tmp_path: Path, factor: float) -> None:
        with pytest.raises(MindferryError, match=r"lm_head.weight differs .* tie_word_embeddings"):
            open_source(self.with_head(tmp_path / "s", factor, True))

    def test_untied_without_head(self, tmp_path: Path) -> None:
        with pytest.raises(MindferryError, match=r"lm_head.weight is missing.*tie_word_embeddings = false"):
            open_source(self.with_head(tmp_path / "s", None, False))

    def test_untied_with_head(self, tmp_path: Path) -> None:
        convert(open_source(self.with_head(tmp_path / "s", 2.0, False)), tmp_path / "out")
        out = load_file(tmp_path / "out/model.safetensors")
        np.testing.assert_array_equal(out["output_layer.weight"], out["embedding.word_embeddings.weight"] * 2)


def test_all_misfits_in_one_error(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")

    def break_it(tensors):
        tensors["transformer.h.0.mlp.c_fcc.weight"] = tensors.pop("transformer.h.0.mlp.c_fc.weight")
        tensors["transformer.h.1.attn.c_attn.bias"] = np.zeros(71, np.float32)
        tensors["transformer.h.2.ln_1.weight"] = np.zeros(24, np.float32)
        tensors["transformer.wpe.weight"] = np.zeros((19, 24), np.int32)

    rewrite(tmp_path / "src", break_it)
    with pytest.raises(MindferryError) as caught:
        open_source(tmp_path / "src")
    text = str(caught.value)
    assert "1 missing: h.0.mlp.c_fc.weight (nearest: h.0.mlp.c_fcc.weight)" in text
    assert "2 surplus: h.0.mlp.c_fcc.weight, h.2.ln_1.weight" in text
    assert "the file has 3 layers, the configuration says 2" in text
    assert "h.1.attn.c_attn.bias found [71], expected [72]" in text
    assert "wpe.weight (int32)" in text


def test_case_14_inner_size_contradicts_the_matrix(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src", n_inner=48)
    set_config(tmp_path / "src", n_inner=None)
    with pytest.raises(
        MindferryError, match=r"c_fc.weight found \[24, 48\], expected \[24, 96\].*n_inner = null"
    ):
        open_source(tmp_path / "src")


def test_ignorable_buffers_are_named_with_a_reason(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")

    def add(tensors):
        tensors["transformer.h.0.attn.bias"] = np.tril(np.ones((1, 1, 19, 19), np.uint8))
        tensors["transformer.h.1.attn.masked_bias"] = np.array(-1e4, np.float32)

    rewrite(tmp_path / "src", add)
    report = convert(open_source(tmp_path / "src"), tmp_path / "out")
    assert {row["source"]: "constant" in row["reason"] for row in report.ignored} == {
        "transformer.h.0.attn.bias": True,
        "transformer.h.1.attn.masked_bias": True,
    }


def test_not_finite_weights_are_named(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")

    def poison(tensors):
        tensors["transformer.h.1.mlp.c_proj.weight"][3, 4] = np.nan
        tensors["transformer.h.1.mlp.c_proj.weight"][3, 5] = np.inf
        tensors["transformer.wte.weight"][0, 0] = 70000

    rewrite(tmp_path / "src", poison)
    report = convert(open_source(tmp_path / "src"), tmp_path / "out", dtype="float16")
    assert report.warnings == [
        "embedding.word_embeddings.weight: 1 of 1464 values do not fit into float16",
        "h.1.mlp.c_proj.weight: 2 of 2304 values are NaN or infinite",
    ]


def test_shards_and_index(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")
    source = open_source(tmp_path / "src")
    convert(source, tmp_path / "one")
    convert(source, tmp_path / "many", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    whole = load_file(tmp_path / "one/model.safetensors")
    parts = {file: load_file(tmp_path / "many" / file) for file in files}
    assert all(np.array_equal(parts[file][name], whole[name]) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in whole.values())
    largest = max(value.nbytes for value in whole.values())
    assert all(sum(v.nbytes for v in part.values()) <= max(20_000, largest) for part in parts.values())


def test_sharded_source_written_by_transformers(tmp_path: Path) -> None:
    model = make_gpt2(tmp_path / "src")
    model.float().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded/model.safetensors.index.json").exists()
    convert(open_source(tmp_path / "src"), tmp_path / "a")
    convert(open_source(tmp_path / "sharded"), tmp_path / "b")
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_files_follow_the_umask(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")
    old = os.umask(0o027)
    try:
        convert(open_source(tmp_path / "src"), tmp_path / "out")
    finally:
        os.umask(old)
    assert (tmp_path / "out/model.safetensors").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_checksums_are_those_of_the_bytes(tmp_path: Path) -> None:
    import hashlib

    make_gpt2(tmp_path / "src")
    report = convert(open_source(tmp_path / "src"), tmp_path / "out", dtype="bfloat16")
    from safetensors import safe_open

    with safe_open(tmp_path / "out/model.safetensors", "pt") as file:
        for row in report.used:
            raw = file.get_tensor(row.target).view(torch.uint8).numpy().tobytes()
            assert hashlib.sha256(raw).hexdigest() == row.sha256
            assert row.dtype == "bfloat16"


def test_nothing_is_left_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_gpt2(tmp_path / "src")
    source = open_source(tmp_path / "src")
    source.tensors.read = lambda name: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # type: ignore
    with pytest.raises(MindferryError, match="No space left"):
        convert(source, tmp_path / "out", max_shard_bytes=20_000)
    assert list((tmp_path / "out").iterdir()) == []


def test_an_existing_model_is_not_overwritten(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")
    source = open_source(tmp_path / "src")
    convert(source, tmp_path / "out")
    with pytest.raises(MindferryError, match="already holds"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "function"),
    [
        (name, values)
        for name, values in (families()["gpt2"].config["activation_function"].values or {}).items()
    ],
)
def test_activation_table_against_transformers(name: str, function: str) -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-5, 5, 201, dtype=torch.float64)
    np.testing.assert_allclose(ACT2FN[name](x).numpy(), ACTIVATIONS[function](x.numpy()), rtol=0, atol=1e-9)


def test_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    """They mean nothing without their scales, which no rule knows."""
    import ml_dtypes

    make_gpt2(tmp_path / "src")

    def narrow(tensors):
        name = "transformer.h.0.mlp.c_fc.weight"
        tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)

    rewrite(tmp_path / "src", narrow)
    with pytest.raises(
        MindferryError, match=r"no plain floating-point numbers: h.0.mlp.c_fc.weight \(float8_e4m3fn\)"
    ):
        open_source(tmp_path / "src")
