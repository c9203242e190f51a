"""The way back: an untouched model returns bit for bit and loads in the framework it came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.weights import TargetLayout, convert
from mindferry.weights.exporting import Cut, Trained, export
from mindferry.weights.tensor_store import SafetensorsStore, same_bits

from .test_families import CASES, IDS, build
from .test_nanogpt import checkpoint as nanogpt_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def migrated(
    path: Path, *, layout: TargetLayout | None = None, dtype: str | None = "float32", **options
) -> Trained:
    """What `locate` gives for a run whose source is `path`/src."""
    source = open_source(path / "src", layout=layout, **options)
    report = convert(source, path / "run/model", dtype=dtype)
    migration = {
        "source": {"path": str(path / "src"), "format": source.format, "family": source.family},
        "model": source.spec.model_dump(),
        "config": [vars(d) for d in source.decisions],
        "weights": report.to_json(),
    }
    migration = json.loads(json.dumps(migration))
    return Trained(path / "run", path / "run/model", 0, source.spec, source.rules.geometry.layout, migration)


def store(path: Path) -> SafetensorsStore:
    return SafetensorsStore([path / "model.safetensors"])


def assert_same_tensors(a: Path, b: Path, except_for: tuple[str, ...] = ()) -> None:
    one, two = store(a), store(b)
    assert set(one.names()) - set(except_for) == set(two.names()) - set(except_for)
    for name in one.names():
        if name not in except_for:
            assert same_bits(one.read(name), two.read(name)), name


@pytest.mark.parametrize("case", CASES)
def test_untouched_round_trip(tmp_path: Path, case: str) -> None:
    model = build(tmp_path / "src", case)
    report = export(migrated(tmp_path), "hf", tmp_path / "back")
    positions = ("model.decoder.embed_positions.weight",) if case.startswith("opt") else ()
    assert_same_tensors(tmp_path / "src", tmp_path / "back", positions)
    assert report.created == []
    before, after = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("src", "back"))
    before.pop("dtype"), after.pop("dtype")
    assert after == before
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", attn_implementation="eager", dtype="float32"
    ).eval()
    ids = torch.tensor(IDS[None])
    with torch.no_grad():
        assert torch.equal(model.float()(ids).logits, again(ids).logits)


@pytest.mark.parametrize(
    "layout", [TargetLayout("flat", "concatenated"), TargetLayout("flat", "interleaved")]
)
def test_every_layout_comes_back(tmp_path: Path, layout: TargetLayout) -> None:
    build(tmp_path / "src", "qwen3")
    export(migrated(tmp_path, layout=layout), "hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "src", tmp_path / "back")


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("through", ["float32", None])
def test_half_precision_comes_back(tmp_path: Path, stored: str, through: str | None) -> None:
    model = build(tmp_path / "src", "llama")
    model.to(getattr(torch, stored)).save_pretrained(tmp_path / "src")
    export(migrated(tmp_path, dtype=through), "hf", tmp_path / "back")
    assert_same_tensors(tmp_path / "src", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["dtype"] == stored
    export(migrated_again(tmp_path), "hf", tmp_path / "wide", dtype="float32")
    assert store(tmp_path / "wide").dtype("lm_head.weight") == np.float32


def migrated_again(path: Path) -> Trained:
    import shutil

    shutil.rmtree(path / "run")
    return migrated(path)


def test_sharded_export(tmp_path: Path) -> None:
    model = build(tmp_path / "src", "mistral")
    export(migrated(tmp_path), "hf", tmp_path / "back", max_shard_bytes=10_000)
    assert (tmp_path / "back/model.safetensors.index.json").exists()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype="float32")
    ours, theirs = again.state_dict(), model.float().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_changed_values_reach_config_and_weights(tmp_path: Path) -> None:
    build(tmp_path / "src", "llama-llama3")
    trained = migrated(tmp_path)
    changed = trained.spec.model_copy(update={"attention_dropout": 0.25, "rotary_base": 1e6})
    tensors = {k: v.copy() for k, v in load_file(trained.weights / "model.safetensors").items()}
    tensors["decoder.final_layernorm.weight"] += 1
    save_file(tensors, trained.weights / "model.safetensors")
    export(
        Trained(trained.run, trained.weights, 7, changed, trained.layout, trained.migration),
        "hf",
        tmp_path / "b",
    )
    config = json.loads((tmp_path / "b/config.json").read_text())
    assert (config["attention_dropout"], config["rope_theta"]) == (0.25, 1e6)
    assert config["rope_scaling"] == CASES["llama-llama3"][1]["rope_scaling"]
    before = store(tmp_path / "src").read("model.norm.weight")
    np.testing.assert_array_equal(store(tmp_path / "b").read("model.norm.weight"), before + 1)


class TestNanoGPT:
    def test_round_trip(self, tmp_path: Path) -> None:
        for bias in (True, False):
            home = tmp_path / str(bias)
            state = nanogpt_checkpoint(home / "src/ckpt.pt", bias=bias)
            report = export(migrated(home), "nanogpt", home / "back")
            tree = torch.load(home / "back/ckpt.pt", weights_only=True)
            assert tree["model"].keys() == state.keys()
            assert all(torch.equal(tree["model"][name], state[name]) for name in state)
            assert tree["model_args"] == torch.load(home / "src/ckpt.pt")["model_args"]
            assert tree["model"]["lm_head.weight"] is tree["model"]["transformer.wte.weight"]
            assert "no optimizer" in report.warnings[0]

    @pytest.mark.parametrize("bias", [True, False])
    def test_to_hugging_face(self, tmp_path: Path, bias: bool) -> None:
        from .reference import forward

        nanogpt_checkpoint(tmp_path / "src/ckpt.pt", bias=bias)
        trained = migrated(tmp_path)
        report = export(trained, "hf", tmp_path / "back")
        assert len(report.created) == (0 if bias else 8)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").double().eval()
        assert type(model).__name__ == "GPT2LMHeadModel"
        ids = IDS[:11] % 64
        with torch.no_grad():
            found = model(torch.tensor(ids[None])).logits[0].numpy()
        params = load_file(trained.weights / "model.safetensors")
        np.testing.assert_allclose(found, forward(trained.spec, params, ids), rtol=0, atol=1e-10)

    def test_shift_that_was_trained_has_no_place(self, tmp_path: Path) -> None:
        nanogpt_checkpoint(tmp_path / "src/ckpt.pt", bias=False)
        trained = migrated(tmp_path)
        tensors = {k: v.copy() for k, v in load_file(trained.weights / "model.safetensors").items()}
        tensors["decoder.final_layernorm.beta"][3] = 0.5
        save_file(tensors, trained.weights / "model.safetensors")
        with pytest.raises(MindferryError, match=r"final_layernorm.beta was trained away from 0"):
            export(trained, "nanogpt", tmp_path / "back")
        assert not (tmp_path / "back").exists()
        export(trained, "hf", tmp_path / "hf")

    def test_from_hugging_face(self, tmp_path: Path) -> None:
        config = transformers.GPT2Config(vocab_size=64, n_positions=11, n_embd=12, n_layer=2, n_head=3,
                                         bos_token_id=0, eos_token_id=0)  # fmt: skip
        transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "src")
        report = export(migrated(tmp_path), "nanogpt", tmp_path / "back")
        assert "gelu_tanh" in report.warnings[1]
        back = open_source(tmp_path / "back", assume={"activation": "gelu_tanh"})
        convert(back, tmp_path / "again")
        assert_same_tensors(tmp_path / "run/model", tmp_path / "again")


class TestRefusals:
    def test_format_that_cannot_hold_the_model(self, tmp_path: Path) -> None:
        build(tmp_path / "src", "llama")
        with pytest.raises(MindferryError, match=r"nanoGPT cannot hold.*position_embedding is 'rope'"):
            export(migrated(tmp_path), "nanogpt", tmp_path / "back")

    def test_output_that_exists(self, tmp_path: Path) -> None:
        build(tmp_path / "src", "llama")
        (tmp_path / "back").mkdir()
        (tmp_path / "back/x").write_text("mine")
        with pytest.raises(UsageError, match="not empty"):
            export(migrated(tmp_path), "hf", tmp_path / "back")
        assert [p.name for p in (tmp_path / "back").iterdir()] == ["x"]

    @pytest.mark.parametrize("options", [{"to": "onnx"}, {"to": "hf", "dtype": "int8"}])
    def test_unknown_words(self, tmp_path: Path, options: dict) -> None:
        build(tmp_path / "src", "llama")
        with pytest.raises(UsageError, match="is not one of"):
            export(migrated(tmp_path), out=tmp_path / "back", **options)

    def test_checkpoint_of_another_model(self, tmp_path: Path) -> None:
        build(tmp_path / "src", "llama")
        trained = migrated(tmp_path)
        tensors = {k: v.copy() for k, v in load_file(trained.weights / "model.safetensors").items()}
        tensors.pop("decoder.final_layernorm.weight")
        tensors["x"] = np.zeros(1, np.float32)
        tensors["output_layer.weight"] = np.zeros((3, 3), np.float32)
        save_file(tensors, trained.weights / "model.safetensors")
        with pytest.raises(MindferryError) as caught:
            export(trained, "hf", tmp_path / "back")
        for part in (
            "1 missing: decoder.final_layernorm.weight",
            "1 surplus: x",
            "output_layer.weight found [3, 3]",
        ):
            assert part in str(caught.value)
        assert not (tmp_path / "back").exists()


class TestMegatron:
    """Shards written by export against the shards that test_megatron writes row by row."""

    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
    @pytest.mark.parametrize("family", ["gpt2", "llama"])
    def test_shards_are_those_of_the_published_layout(
        self, tmp_path: Path, family: str, tp: int, pp: int
    ) -> None:
        from mindferry.sources.megatron import padded_vocab

        from .test_megatron import hf_model, write_megatron

        hf = hf_model(tmp_path / "src", family)
        trained = migrated(tmp_path)
        report = export(trained, "megatron", tmp_path / "back", cut=Cut(tp, pp))
        assert "padded" in report.warnings[0]
        rows = padded_vocab(trained.spec.vocab_size, 128, tp)
        expected = write_megatron(tmp_path / "expected", hf, family, tp=tp, pp=pp, rows=rows)
        for folder in expected.iterdir():
            ours, theirs = (
                torch.load(base / folder.name / "model_optim_rng.pt", weights_only=False)
                for base in (tmp_path / "back/iter_0000000", expected)
            )
            assert ours["model"].keys() == theirs["model"].keys()
            for name, value in theirs["model"].items():
                found = ours["model"][name]
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    value = torch.where(value == 9.0, 0.0, value)  # the other writer pads with nines
                assert torch.equal(found, value), name
            stated = vars(theirs["args"])
            same = {key for key in stated if key in vars(ours["args"])} - {"make_vocab_size_divisible_by"}
            assert len(same) > 15
            for key in same - {"bias_gelu_fusion"}:
                assert vars(ours["args"])[key] == stated[key], key

    @pytest.mark.parametrize("case", ["llama-linear", "llama-biases", "qwen2", "qwen3"])
    def test_round_trip(self, tmp_path: Path, case: str) -> None:
        build(tmp_path / "src", case, intermediate_size=38)
        trained = migrated(tmp_path)
        export(trained, "megatron", tmp_path / "back", cut=Cut(2, 2))
        source = open_source(tmp_path / "back")
        convert(source, tmp_path / "again")
        assert_same_tensors(tmp_path / "run/model", tmp_path / "again")
        ignored = {"family", "bos_token_id", "eos_token_id", "add_qkv_bias"}
        assert source.spec.model_dump(exclude=ignored) == trained.spec.model_dump(exclude=ignored)

    @pytest.mark.parametrize(
        ("case", "cut", "message"),
        [
            ("llama", Cut(4, 1), "num_attention_heads 6 does not divide over 4.*num_query_groups 2"),
            ("llama", Cut(1, 3), "num_layers 2 does not divide over 3"),
            ("llama-llama3", Cut(), "fixed factors|cannot hold rope_scaling"),
            ("gpt_neox", Cut(), "parallel_residual"),
            ("mistral", Cut(), "sliding_window"),
            ("opt", Cut(), "relu"),
        ],
    )
    def test_what_megatron_cannot(self, tmp_path: Path, case: str, cut: Cut, message: str) -> None:
        build(tmp_path / "src", case)
        with pytest.raises(MindferryError, match=message):
            export(migrated(tmp_path), "megatron", tmp_path / "back", cut=cut)
        assert not (tmp_path / "back").exists()


class TestMindformers132:
    def test_names_and_yaml(self, tmp_path: Path) -> None:
        from .test_megatron import hf_model
        from .test_other_formats import TestMindformersGPT2

        hf = hf_model(tmp_path / "src", "gpt2")
        report = export(migrated(tmp_path), "mindformers-1.3.2", tmp_path / "back")
        import mindspore as ms

        loaded = ms.load_checkpoint(str(tmp_path / "back/gpt2.ckpt"))
        found = {name: value.asnumpy() for name, value in loaded.items()}
        expected = TestMindformersGPT2.parameters(hf)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
        assert "float16" in report.warnings[0]
        source = open_source(tmp_path / "back")
        convert(source, tmp_path / "again")
        assert_same_tensors(tmp_path / "run/model", tmp_path / "again")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"n_inner": 50}, "expand_ratio is a whole number"),
            ({"layer_norm_epsilon": 1e-6}, "layernorm_epsilon"),
            ({"tie_word_embeddings": False}, "tie_word_embeddings"),
            ({"activation_function": "gelu"}, "gelu_erf"),
        ],
    )
    def test_its_limits_are_named(self, tmp_path: Path, changes: dict, message: str) -> None:
        from .test_megatron import hf_model

        hf_model(tmp_path / "src", "gpt2", **changes)
        with pytest.raises(MindferryError, match=message):
            export(migrated(tmp_path), "mindformers-1.3.2", tmp_path / "back")
        assert not (tmp_path / "back").exists()
