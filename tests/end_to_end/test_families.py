"""Every family on mindformers' GPTModel: aligned with transformers, and parted where a fault is planted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.checking.alignment import align
from mindferry.checking.parity import train_both
from mindferry.demo.source import train_tokenizer
from mindferry.errors import MindferryError, UsageError
from mindferry.targets.run_directory import RunDirectory

from ..support import make_run
from ..weights.test_families import CASES, build

TRAINABLE = [case for case in CASES if case != "mistral-window-below-length"]


def family_run(tmp_path: Path, corpus: Path, case: str, **changes: Any) -> tuple[Path, Path]:
    """A source of `case` with a tokenizer of its own, and the run made from it."""
    source = tmp_path / "source"
    build(source, case, vocab_size=300, **changes)
    train_tokenizer(source, 300)
    return source, make_run(source, corpus, tmp_path / "run", seq_length=32)


@pytest.mark.parametrize("case", TRAINABLE)
def test_aligned(tmp_path: Path, corpus: Path, case: str) -> None:
    source, run = family_run(tmp_path, corpus, case)
    found = align(RunDirectory.open(run), source)
    assert found.aligned, found


@pytest.mark.parametrize("case", ["llama-llama3", "qwen3", "gpt_neox"])
def test_training_agrees(tmp_path: Path, corpus: Path, case: str) -> None:
    source, run = family_run(tmp_path, corpus, case)
    parity = train_both(RunDirectory.open(run), source, steps=10)
    assert parity.good, parity
    assert parity.target_losses[-1] < parity.target_losses[0]


def change(run: Path, name: str, how: Any) -> None:
    path = run / "model" / "model.safetensors"
    tensors = dict(load_file(path))
    tensors[name] = np.ascontiguousarray(how(tensors[name]))
    save_file(tensors, path)


def edit(run: Path, old: str, new: str) -> None:
    path = run / "run.yaml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"


def pair_neighbours(weight: np.ndarray) -> np.ndarray:
    """Rows of every q and k head from half-and-half to neighbouring pairs: the other rotary convention."""
    heads = weight.reshape(2, 5, 4, 24)  # groups, (3 q + k + v), head_dim, hidden
    order = [0, 2, 1, 3]
    heads = np.concatenate([heads[:, :4, order], heads[:, 4:]], axis=1)
    return heads.reshape(weight.shape)


def flat_groups(weight: np.ndarray) -> np.ndarray:
    """Rows as [all q | all k | all v] where groups belong."""
    heads = weight.reshape(2, 5, 4, 24)
    return np.concatenate(
        [heads[:, :3].reshape(-1, 24), heads[:, 3].reshape(-1, 24), heads[:, 4].reshape(-1, 24)]
    )


def swap_gate_and_up(weight: np.ndarray) -> np.ndarray:
    """up0, gate0, up1, gate1, ... where gate0, up0, ... belong."""
    return weight.reshape(37, 2, 24)[:, ::-1].reshape(74, 24)


def gates_then_ups(weight: np.ndarray) -> np.ndarray:
    """Megatron's order, which mindformers 1.6 used too."""
    return weight.reshape(37, 2, 24).swapaxes(0, 1).reshape(74, 24)


@pytest.mark.parametrize(
    ("case", "plant", "where"),
    [
        ("llama", lambda r: change(r, QKV, pair_neighbours), "decoder.layers.0"),
        ("llama", lambda r: change(r, QKV, flat_groups), "decoder.layers.0"),
        ("llama", lambda r: change(r, FC1, swap_gate_and_up), "decoder.layers.1"),
        ("llama", lambda r: change(r, FC1, gates_then_ups), "decoder.layers.1"),
        ("llama-theta", lambda r: edit(r, "rotary_base: 1000000.0", "rotary_base: 10000.0"), "decoder.layers.0"),
        ("qwen3", lambda r: edit(r, "layernorm_epsilon: 1.0e-06", "layernorm_epsilon: 1.0e-04"), "decoder.layers.0"),
        ("gpt_neox", lambda r: edit(r, "parallel_residual: true", "parallel_residual: false"), "decoder.layers.0"),
        ("gpt_neox", lambda r: edit(r, "rotary_percent: 0.25", "rotary_percent: 1.0"), "decoder.layers.0"),
    ],
    ids=["rotary pairing", "group order", "gate and up swapped", "gate then up", "theta", "q/k norm eps",
         "residual order", "rotary share"],
)  # fmt: skip
def test_planted_faults(tmp_path: Path, corpus: Path, case: str, plant: Any, where: str) -> None:
    source, run = family_run(tmp_path, corpus, case)
    plant(run)
    assert align(RunDirectory.open(run), source).first_divergence == where


def test_a_missing_q_norm_is_named(tmp_path: Path, corpus: Path) -> None:
    source, run = family_run(tmp_path, corpus, "qwen3")
    edit(run, "qk_layernorm: true", "qk_layernorm: false")
    with pytest.raises(MindferryError, match=r"surplus .*k_layernorm"):
        align(RunDirectory.open(run), source)


def test_a_window_shorter_than_the_sequence_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(UsageError, match="sliding_window"):
        family_run(tmp_path, corpus, "mistral-window-below-length")


@pytest.mark.parametrize(
    ("key", "value"),
    [("rope_scaling", {"type": "llama3"}), ("parallel_residual", True), ("activation", "gelu_erf")],
)
def test_what_mindformers_own_layers_cannot_compute_is_refused(key: str, value: Any) -> None:
    """Given rope_scaling, its GPTModel would silently build no rotary embedding."""
    from mindferry.training.models import check_reference

    plain = {
        "layer_spec": "reference",
        "rope_scaling": None,
        "parallel_residual": False,
        "activation": "silu",
    }
    check_reference(SimpleNamespace(**plain))
    with pytest.raises(UsageError, match=key):
        check_reference(SimpleNamespace(**{**plain, key: value}))
