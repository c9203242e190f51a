"""`mindferry export` of a real run: migrated, perhaps trained, and back in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file
from typer.testing import CliRunner

from mindferry.cli import export as export_command

from .test_export import assert_same_tensors
from .test_gpt2_model import make_gpt2

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run made by migrate from a GPT-2 with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from mindferry import migration

    home = tmp_path_factory.mktemp("export")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, "<|endoftext|>"])}
    make_gpt2(home / "src", vocab_size=257, bos_token_id=256, eos_token_id=256)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(home / "src/tokenizer.json"))
    (home / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    migration.migrate(
        home / "src",
        [home / "corpus.txt"],
        home / "run",
        migration.Choices(seq_length=16, batch_size=2, steps=2),
    )
    return home / "run"


def export(*arguments: str):
    app = typer.Typer()
    export_command.register(app)
    return CliRunner().invoke(app, list(arguments))


def test_before_training_it_is_the_source(run_directory: Path, tmp_path: Path) -> None:
    result = export(str(run_directory), "--to", "hf", "--out", str(tmp_path / "back"), "--json")
    assert result.exit_code == 0, result.output
    tree = json.loads(result.stdout)
    assert (tree["format"], tree["step"], tree["tensors"]) == ("hf", 0, 28)
    source = run_directory.parent / "src"
    assert_same_tensors(source, tmp_path / "back")
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "back/config.json").read_text()
    )
    assert (tmp_path / "back/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_checkpoint_of_the_run(run_directory: Path, tmp_path: Path) -> None:
    from mindferry.training import checkpoints

    weights = {
        k: v + np.float32(0.5) for k, v in load_file(run_directory / "model/model.safetensors").items()
    }
    root = run_directory / "checkpoints"
    for step, shift in ((3, 0), (7, 1)):
        values = {name: value + np.float32(shift) for name, value in weights.items()}
        checkpoints.save(root, step, values, {"global_step": np.zeros(1)}, {"step": step}, keep=5)
    before = load_file(run_directory.parent / "src/model.safetensors")["transformer.ln_f.bias"]
    for name, arguments, shift in (
        ("newest", [str(run_directory)], 1.5),
        ("named", [str(run_directory), "--checkpoint", "step-00000003"], 0.5),
        ("path", [str(root / "step-00000003")], 0.5),
        ("none", [str(run_directory), "--checkpoint", "none"], 0.0),
    ):
        result = export(*arguments, "--to", "hf", "--out", str(tmp_path / name))
        assert result.exit_code == 0, result.output
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        found = model.transformer.ln_f.bias.detach().numpy()
        np.testing.assert_allclose(found, before + shift, rtol=0, atol=1e-6)
    wrong = export(str(run_directory), "--checkpoint", "../../x", "--to", "hf", "--out", str(tmp_path / "x"))
    assert wrong.exit_code == 2
    assert "step-00000003, step-00000007" in wrong.output
    (root / "step-00000003/model/model.safetensors").write_bytes(b"cut")
    broken = export(str(root / "step-00000003"), "--to", "hf", "--out", str(tmp_path / "x"))
    assert broken.exit_code == 1
    assert not (tmp_path / "x").exists()


def test_wrong_use(run_directory: Path, tmp_path: Path) -> None:
    assert export(str(tmp_path), "--to", "hf", "--out", str(tmp_path / "x")).exit_code == 2
    assert export(str(run_directory), "--to", "hff", "--out", str(tmp_path / "x")).exit_code == 2
    assert export(str(run_directory), "--to", "hf", "--out", str(run_directory)).exit_code == 2
    assert "Example: mindferry export" in export("--help").stdout
