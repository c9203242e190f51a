"""GPTModel of mindformers 1.6 and later as a source: packings told apart, whole or cut, never guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from mindferry.errors import MindferryError, UsageError
from mindferry.partition.layout import Grid
from mindferry.partition.opening import Asked
from mindferry.partition.reshard import Wanted, reshard
from mindferry.sources import open_source
from mindferry.sources.mindformers_mcore import packing
from mindferry.spec import ModelSpec
from mindferry.weights import TargetLayout, convert
from mindferry.weights.target import target_names

from ..support import gpt2_spec, make_run, run_cli

HEADS, GROUPS, SIZE, FFN, HIDDEN = 4, 2, 4, 6, 8


def spec() -> ModelSpec:
    return gpt2_spec(
        family="llama",
        vocab_size=32,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=SIZE,
        ffn_hidden_size=FFN,
        max_position_embeddings=16,
        position_embedding="rope",
        normalization="RMSNorm",
        activation="silu",
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=False,
    )


def block(**changes: Any) -> dict[str, Any]:
    """model_config as a person of 1.6 or 1.7 writes it: Hugging Face's words, no packing."""
    config = {
        "vocab_size": 32,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": SIZE,
        "intermediate_size": FFN,
        "max_position_embeddings": 16,
        "seq_length": 16,
        "position_embedding_type": "rope",
        "rope_theta": 10000.0,
        "normalization": "RMSNorm",
        "rms_norm_eps": 1e-5,
        "hidden_act": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "compute_dtype": "bfloat16",
    }
    return {name: value for name, value in {**config, **changes}.items() if value is not None}


def parts() -> dict[str, np.ndarray]:
    """q, k, v, gate, up of both layers, as nobody has packed them yet."""
    rng = np.random.default_rng(0)
    rows = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE, "gate": FFN, "up": FFN}
    return {
        f"{layer}.{name}": rng.standard_normal((count, HIDDEN)).astype(np.float32)
        for layer in range(2)
        for name, count in rows.items()
    }


def packed(contiguous_qkv: bool, contiguous_mlp: bool) -> dict[str, np.ndarray]:
    """The parameters of GPTModel; the fused ones packed by hand, row by row."""
    rng = np.random.default_rng(1)
    made = {n: rng.standard_normal(s).astype(np.float32) for n, s in target_names(spec()).items()}
    loose = parts()
    for layer in range(2):
        q, k, v, gate, up = (loose[f"{layer}.{name}"] for name in ("q", "k", "v", "gate", "up"))
        qkv = [*q, *k, *v]
        if not contiguous_qkv:
            qkv = []
            for group in range(GROUPS):
                qkv += [
                    *q[group * 8 : group * 8 + 8],
                    *k[group * 4 : group * 4 + 4],
                    *v[group * 4 : group * 4 + 4],
                ]
        fc1 = [*gate, *up] if contiguous_mlp else [row for pair in zip(gate, up, strict=True) for row in pair]
        made[f"decoder.layers.{layer}.self_attention.linear_qkv.weight"] = np.stack(qkv)
        made[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] = np.stack(fc1)
    return made


def write(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    tree = {
        "use_legacy": False,
        "runner_config": {"batch_size": 1, "epochs": 1},
        "parallel_config": {},
        "model": {"model_config": config, "arch": {"type": "X"}},
    }
    (directory / "train.yaml").write_text(yaml.safe_dump(tree))
    save_file(tensors, directory / "model.safetensors")
    return directory


def converted(source: Any, out: Path) -> dict[str, np.ndarray]:
    convert(source, out)
    return load_file(out / "model.safetensors")


PACKINGS = [
    ({"use_contiguous_weight_layout": True}, None, (True, True)),
    ({"use_contiguous_weight_layout": False}, None, (False, True)),
    ({"use_contiguous_weight_layout_attention": False}, None, (False, False)),
    ({"use_contiguous_weight_layout_attention": True}, None, (True, False)),
    ({"use_interleaved_weight_layout_mlp": False}, None, (False, True)),
    ({}, "1.6", (True, True)),
    ({}, 1.6, (True, True)),
    ({}, "1.9.0", (False, False)),
    ({"mindformers_version": "1.7.0"}, None, (False, False)),
]


@pytest.mark.parametrize(("keys", "assumed", "contiguous"), PACKINGS)
def test_each_packing_comes_to_the_same_network(
    tmp_path: Path, keys: dict[str, Any], assumed: Any, contiguous: tuple[bool, bool]
) -> None:
    path = write(tmp_path / "src", block(**keys), packed(*contiguous))
    source = open_source(path, assume={"mindformers": assumed} if assumed else None)
    assert source.format == "mindformers-mcore"
    assert source.spec == spec().model_copy(update={"hidden_dropout": 0.0, "attention_dropout": 0.1})
    found, expected = converted(source, tmp_path / "out"), packed(False, False)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert any("packing" in text for text in source.warnings)


def test_an_unsaid_packing_is_asked_about(tmp_path: Path) -> None:
    path = write(tmp_path / "src", block(), packed(True, True))
    done = run_cli("map", path)
    assert done.returncode == 2
    assert "--assume mindformers=1.6" in done.stderr
    assert "same names and shapes" in done.stderr
    assert run_cli("map", path, "--assume", "mindformers=1.6").returncode == 0


@pytest.mark.parametrize(
    ("keys", "assumed", "words"),
    [
        ({}, "1.3.2", "none of 1.6"),
        ({"use_contiguous_weight_layout_attention": False}, "1.6", "keys of different releases"),
        ({"use_contiguous_weight_layout": True}, "1.7", "keys of different releases"),
        (
            {"use_contiguous_weight_layout": True, "use_interleaved_weight_layout_mlp": True},
            None,
            "keys of different releases",
        ),
    ],
)
def test_contradictions(keys: dict[str, Any], assumed: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        packing(block(**keys), assumed, "x.yaml")


def test_qwen3_trains_from_1_7_on_only_so_its_packing_is_known() -> None:
    assert packing({"model_type": "qwen3"}, None, "x.yaml")[0] == TargetLayout()


@pytest.mark.parametrize("contiguous", [False, True])
def test_a_cut_checkpoint_is_merged(tmp_path: Path, contiguous: bool) -> None:
    config = block(
        use_contiguous_weight_layout_attention=contiguous, use_interleaved_weight_layout_mlp=not contiguous
    )
    whole = write(tmp_path / "whole", config, packed(contiguous, contiguous))
    reshard(whole, tmp_path / "cut", Asked(config=whole / "train.yaml"), Wanted(Grid(2, 2, 2)))
    expected = packed(False, False)
    # As reshard leaves it; and as a cluster does: no partition.json, below checkpoint/, the strategy in the YAML.
    (tmp_path / "cut" / "train.yaml").write_text((whole / "train.yaml").read_text())
    found = converted(open_source(tmp_path / "cut"), tmp_path / "one")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    (tmp_path / "cut" / "partition.json").unlink()
    tree = yaml.safe_load((whole / "train.yaml").read_text())
    tree["parallel_config"] = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2}
    (tmp_path / "cut" / "train.yaml").unlink()
    (tmp_path / "output").mkdir()
    (tmp_path / "cut").rename(tmp_path / "output" / "checkpoint")
    (tmp_path / "output" / "train.yaml").write_text(yaml.safe_dump(tree))
    source = open_source(tmp_path / "output")
    assert "merged from dp=2,mp=2,pp=2" in source.warnings
    found = converted(source, tmp_path / "two")
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"normalization": None}, "normalization"),
        ({"hidden_size": 16}, "do not fit"),
        ({"rotary_interleaved": True}, "neighbouring channels"),
        ({"num_moe_experts": 8}, "mixtures of experts"),
        ({"hidden_act": "relu6"}, "relu6"),
    ],
)
def test_yaml_that_does_not_say_or_cannot_be_carried(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    config = block(use_contiguous_weight_layout_attention=False, **changes)
    path = write(tmp_path / "src", config, packed(False, False))
    with pytest.raises(MindferryError, match=words):
        open_source(path)


def test_what_the_yaml_leaves_out_can_be_assumed(tmp_path: Path) -> None:
    config = block(use_contiguous_weight_layout_attention=False, normalization=None)
    path = write(tmp_path / "src", config, packed(False, False))
    assert open_source(path, assume={"normalization": "RMSNorm"}).spec.normalization == "RMSNorm"


def test_a_run_of_ours_is_a_source(source: Path, corpus: Path, tmp_path: Path) -> None:
    """map and migrate take a run; the second run has the first one's weights, bit for bit."""
    first = make_run(source, corpus, tmp_path / "first")
    again = make_run(first, corpus, tmp_path / "second")
    one, two = (load_file(run / "model" / "model.safetensors") for run in (first, again))
    assert one.keys() == two.keys()
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert open_source(first).spec == open_source(source).spec
    assert run_cli("map", first).returncode == 0


@pytest.mark.long
def test_a_run_of_ours_verifies_against_another(source: Path, corpus: Path, tmp_path: Path) -> None:
    first = make_run(source, corpus, tmp_path / "first")
    again = make_run(first, corpus, tmp_path / "second")
    done = run_cli("verify", again, "--against", first, "--training-steps", "2")
    assert done.returncode == 0, done.stderr + done.stdout
