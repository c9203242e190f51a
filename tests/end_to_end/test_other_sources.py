"""From a nanoGPT checkpoint to a verified, trained run and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from mindferry.demo.source import train_tokenizer

from ..support import run_cli
from ..weights.test_nanogpt import checkpoint

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt_from_checkpoint_to_checkpoint(tmp_path: Path, corpus: Path, bias: bool) -> None:
    tokenizer, run, back = tmp_path / "tokenizer", tmp_path / "run", tmp_path / "back"
    tokenizer.mkdir()
    train_tokenizer(tokenizer, 300)
    source = tmp_path / "ckpt.pt"
    state = checkpoint(source, prefix="_orig_mod.", vocab_size=300, block_size=32, bias=bias)

    bare = run_cli("migrate", source, "--data", corpus, "--out", run, "--seq-length", "16")
    assert bare.returncode == 2, "a checkpoint has no tokenizer, and none is made up"
    assert "tokenizer" in bare.stderr

    options = ("--tokenizer", tokenizer, "--assume", "activation=gelu_erf", "--steps", "6")
    done = run_cli(
        "migrate", source, "--data", corpus, "--out", run, "--seq-length", "16", *options, "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "good"

    untouched = run_cli("export", run, "--to", "nanogpt", "--out", back)
    assert untouched.returncode == 0, untouched.stderr
    returned = torch.load(back / "ckpt.pt", weights_only=True)["model"]
    for name, tensor in state.items():
        assert torch.equal(returned[name], tensor), name

    verified = run_cli("verify", run, "--against", source, "--training-steps", "4", "--json")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert json.loads(verified.stdout)["aligned"] is True
    assert run_cli("train", run, "--json").returncode == 0
    if not bias:
        weights = load_file(run / "checkpoints" / "step-00000006" / "model" / "model.safetensors")
        assert not any(weights[name].any() for name in weights if name.endswith(".beta"))
    trained = run_cli("export", run, "--to", "hf", "--out", tmp_path / "hf")
    assert trained.returncode == 0, trained.stderr
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert model.config.vocab_size == 300
    assert not torch.equal(model.transformer.wte.weight, state["transformer.wte.weight"])
