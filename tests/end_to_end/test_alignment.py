"""verify on real pairs: it says aligned where it should, and names the place where a fault was planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.checking.alignment import align
from mindferry.checking.parity import train_both
from mindferry.errors import MindferryError
from mindferry.targets.run_directory import RunDirectory

from ..support import make_run, make_source, run_cli

PAIRS: list[dict[str, Any]] = [
    {"n_layer": 1, "activation_function": "gelu_new"},
    {"n_layer": 1, "activation_function": "gelu", "tie_word_embeddings": False},
    {"n_layer": 2, "activation_function": "gelu", "n_inner": 100},
    {"n_layer": 2, "activation_function": "gelu_new", "tie_word_embeddings": False, "n_inner": 40},
    {"n_layer": 12, "activation_function": "gelu_new"},
    {"n_layer": 12, "activation_function": "gelu", "tie_word_embeddings": False},
    {"n_layer": 2, "layer_norm_epsilon": 1e-3, "n_head": 3, "activation_function": "relu"},
]


@pytest.mark.parametrize("config", PAIRS, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()))
def test_configurations_are_aligned(tmp_path: Path, corpus: Path, config: dict[str, Any]) -> None:
    source = make_source(tmp_path / "gpt2", **config)
    run = make_run(source, corpus, tmp_path / "run")
    found = align(RunDirectory.open(run), source)
    assert found.aligned, found
    assert found.first_divergence is None
    scale = max(1.0, 1.0)
    assert found.loss_abs_diff <= 1e-6 * max(1.0, found.loss_source) * scale
    assert found.grad_max_rel_diff <= 1e-4
    assert [row.name for row in found.layers] == [
        "embedding",
        *(f"decoder.layers.{n}" for n in range(config["n_layer"])),
        "decoder.final_layernorm",
        "logits",
    ]


def test_fifty_steps_of_training_agree(run: Path, source: Path) -> None:
    parity = train_both(RunDirectory.open(run), source, steps=50)
    assert len(parity.source_losses) == len(parity.target_losses) == 50
    assert parity.max_loss_diff <= 1e-4, parity
    assert parity.max_lr_diff <= 1e-6
    assert parity.target_losses[-1] < parity.target_losses[0]
    # mindformers' standard on the same numbers: far inside, gradient norms of both sides included.
    assert [row.name for row in parity.standard] == ["first_step_loss", "mean_loss", "global_norm"]
    assert all(row.passed for row in parity.standard)
    assert parity.standard[0].absolute == abs(parity.target_losses[0] - parity.source_losses[0])
    assert 0 < parity.standard[2].relative < 1e-3


def test_the_fused_layers_are_aligned_too(source: Path, corpus: Path, tmp_path: Path) -> None:
    """Same run, our kernels: nobody has to migrate or convert again."""
    from mindferry import kernels

    state = kernels.state()
    run = make_run(source, corpus, tmp_path / "run", layer_spec="fused")
    found = align(RunDirectory.open(run), source)
    assert found.aligned, (found, state)
    parity = train_both(RunDirectory.open(run), source, steps=10)
    assert parity.good, parity


def change_weights(run: Path, change: Any) -> None:
    path = run / "model" / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, path)


def change_yaml(run: Path, old: str, new: str) -> None:
    path = run / "run.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def swap_k_and_v(tensors: dict[str, np.ndarray]) -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    heads = tensors[name].reshape(4, 3, 12, 48)
    tensors[name] = heads[:, [0, 2, 1]].reshape(144, 48)


def untranspose(tensors: dict[str, np.ndarray]) -> None:
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    tensors[name] = tensors[name].T


def shift_positions(tensors: dict[str, np.ndarray]) -> None:
    name = "embedding.position_embeddings.weight"
    tensors[name] = np.roll(tensors[name], 1, axis=0)


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (lambda run: change_weights(run, swap_k_and_v), "decoder.layers.1"),
        (lambda run: change_weights(run, untranspose), "decoder.layers.1"),
        (lambda run: change_weights(run, shift_positions), "embedding"),
        (lambda run: change_yaml(run, "activation: gelu_tanh", "activation: gelu_erf"), "decoder.layers.0"),
        (
            lambda run: change_yaml(run, "layernorm_epsilon: 1.0e-05", "layernorm_epsilon: 1.0e-06"),
            "decoder.layers.0",
        ),
    ],
    ids=["k and v swapped", "square matrix untransposed", "positions shifted", "other GELU", "eps changed"],
)
def test_planted_faults_are_found_and_placed(run: Path, source: Path, plant: Any, where: str) -> None:
    plant(run)
    found = align(RunDirectory.open(run), source)
    assert not found.aligned
    assert found.first_divergence == where


def test_an_untied_head_without_weights_is_named(run: Path, source: Path) -> None:
    change_yaml(run, "tie_word_embeddings: true", "tie_word_embeddings: false")
    with pytest.raises(MindferryError, match=r"missing output_layer\.weight"):
        align(RunDirectory.open(run), source)


def test_an_untied_head_that_starts_equal_shows_in_its_gradient(run: Path, source: Path) -> None:
    """Same logits, same loss: only the gradient tells a copy from a tie."""
    change_yaml(run, "tie_word_embeddings: true", "tie_word_embeddings: false")

    def copy_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"].copy()

    change_weights(run, copy_head)
    found = align(RunDirectory.open(run), source)
    assert found.first_divergence == "embedding.word_embeddings.weight"


def test_another_head_matrix_shows_in_the_logits(run: Path, source: Path) -> None:
    change_yaml(run, "tie_word_embeddings: true", "tie_word_embeddings: false")

    def other_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["output_layer.weight"] = tensors["embedding.word_embeddings.weight"][::-1].copy()

    change_weights(run, other_head)
    assert align(RunDirectory.open(run), source).first_divergence == "logits"


def test_a_run_of_another_model_is_refused(run: Path, tmp_path: Path) -> None:
    other = make_source(tmp_path / "other", vocab_size=512)
    with pytest.raises(MindferryError, match="vocab_size: found 300, the source has 512"):
        align(RunDirectory.open(run), other)


def test_the_command_prints_a_table_and_keeps_the_json_contract(run: Path, source: Path) -> None:
    shown = run_cli("verify", run, "--against", source, "--training-steps", "0")
    assert shown.returncode == 0, shown.stderr
    assert "decoder.layers.1" in shown.stdout
    assert shown.stdout.rstrip().endswith("aligned")
    change_weights(run, untranspose)
    bad = run_cli("verify", run, "--against", source, "--training-steps", "3", "--json")
    assert bad.returncode == 1
    answer = json.loads(bad.stdout)
    assert answer["command"] == "verify"
    assert answer["verdict"] == "problem"
    assert answer["first_divergence"] == "decoder.layers.1"
    assert answer["findings"][0]["id"] == "verify.parted"
    assert {
        "logits_max_abs_diff",
        "loss_abs_diff",
        "grad_max_rel_diff",
        "layers",
        "training",
    } <= answer.keys()
