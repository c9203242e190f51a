"""`mindferry map`: the picture is complete, reads no tensor data, and shows misfits instead of hiding them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from mindferry.cli import map as map_command
from mindferry.sources import open_source
from mindferry.sources.mapping import draw

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(vocab_size=31, n_positions=9, n_embd=12, n_layer=3, n_head=3, n_inner=20,
                                     activation_function="gelu", bos_token_id=0, eos_token_id=0)  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


def run(*arguments: str):
    app = typer.Typer()
    map_command.register(app)
    return CliRunner().invoke(app, list(arguments))


def test_every_tensor_and_parameter_is_in_the_picture(gpt2: Path) -> None:
    source = open_source(gpt2)
    picture = draw(source)
    rows = [row for module in picture.modules for row in module.parameters]
    assert sorted(name for row in rows for name in row["source"]) == sorted(
        load_file(gpt2 / "model.safetensors")
    )
    assert [row["target"] for row in rows] == [step.target for step in source.rules.steps]
    attention = next(m for m in picture.modules if m.target == "decoder.layers.1.self_attention")
    assert attention.source == "transformer.h.1.attn"
    assert attention.called == "ParallelAttention"
    assert attention.settings["num_attention_heads"] == 3
    assert attention.parameters[0] == {
        "source": ["transformer.h.1.attn.c_attn.weight"],
        "target": "decoder.layers.1.self_attention.linear_qkv.weight",
        "transform": "transpose qkv_flat",
        "source_shapes": [[12, 36]],
        "target_shape": [36, 12],
        "dtype": "float32",
    }
    mlp = next(m for m in picture.modules if m.target == "decoder.layers.2.mlp")
    assert (mlp.settings["activation"], mlp.settings["ffn_hidden_size"]) == ("gelu_erf", 20)
    assert any("gelu_erf" in note for note in picture.attention)


def test_json_contract(gpt2: Path) -> None:
    result = run(str(gpt2), "--json")
    assert result.exit_code == 0
    tree = json.loads(result.stdout)
    assert (tree["command"], tree["verdict"], tree["format"], tree["family"]) == (
        "map",
        "good",
        "huggingface",
        "gpt2",
    )
    assert len(tree["modules"]) == 2 + 3 * 4 + 1
    assert {item["source_key"] for item in tree["config"]} >= {"n_embd", "n_inner", "vocab_size"}


def test_text_shows_layers_once(gpt2: Path) -> None:
    text = run(str(gpt2)).stdout
    assert text.count("SelfAttention (ParallelAttention)") == 1
    assert "decoder.layers.0-2.self_attention: SelfAttention" in text
    assert "from transformer.h.0-2.attn" in text
    assert "n_inner = 20 -> ffn_hidden_size = 20" in text


def test_misfits_are_shown_with_the_rest(gpt2: Path, tmp_path: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    tensors["transformer.h.1.attn.c_attn.bias"] = np.zeros(35, np.float32)
    del tensors["transformer.ln_f.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    result = run(str(tmp_path), "--json")
    assert result.exit_code == 1
    tree = json.loads(result.stdout)
    assert tree["verdict"] == "problem"
    assert "ln_f.bias" in tree["findings"][0]["message"]
    assert len(tree["modules"]) == 15
    text = run(str(tmp_path)).stdout
    assert "decoder.layers.1.self_attention" in text
    assert "h.0-2.mlp" in text


def test_assumed_values(gpt2: Path) -> None:
    assert run(str(gpt2), "--assume", "activation=gelu_tanh").exit_code == 2
    assert run(str(gpt2), "--assume", "activation").exit_code == 2
    tree = json.loads(run(str(gpt2), "--assume", "rotary_base=5e4", "--json").stdout)
    assert tree["model"]["rotary_base"] == 5e4


def test_wrong_use(tmp_path: Path) -> None:
    assert run(str(tmp_path / "nothing")).exit_code == 2
    assert "Example: mindferry map" in run("--help").stdout


def test_nothing_is_read_but_headers(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mindferry.weights.tensor_store import SafetensorsStore

    monkeypatch.setattr(SafetensorsStore, "read", lambda self, name: pytest.fail(f"{name} was read"))
    assert draw(open_source(gpt2, check_tensors=False)).problem is None
