"""`target_names` against the parameters of mindformers' own GPTModel, built here from its own layer spec."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindferry.spec import ModelSpec
from mindferry.weights import TargetLayout, target_names
from mindferry.weights.transforms import Chain, Geometry

from .test_transforms import spec_of

ROPE = {
    "position_embedding": "rope",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation": "silu",
}
SPECS = {
    "gpt2": {"num_query_groups": 4},
    "gpt2-untied-small-ffn": {"num_query_groups": 4, "tie_word_embeddings": False, "ffn_hidden_size": 20},
    "llama": {**ROPE, "add_bias_linear": False, "add_qkv_bias": False, "tie_word_embeddings": False},
    "llama-biases": {**ROPE, "tie_word_embeddings": False},
    "qwen2": {**ROPE, "add_bias_linear": False, "add_qkv_bias": True},
    "qwen3": {
        **ROPE,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "kv_channels": 6,
    },
    "gpt_neox": {"position_embedding": "rope", "num_query_groups": 4, "tie_word_embeddings": False},
}


def network_shapes(spec: ModelSpec) -> dict[str, list[int]]:
    """Name -> shape of every parameter of the stock GPTModel for `spec` (built, not run: it needs an NPU)."""
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
    )
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
    from mindformers.parallel_core.transformer_config import TransformerConfig

    config = TransformerConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_query_groups,
        kv_channels=spec.kv_channels,
        ffn_hidden_size=spec.ffn_hidden_size,
        max_position_embeddings=spec.max_position_embeddings,
        seq_length=spec.max_position_embeddings,
        normalization=spec.normalization,
        fused_norm=False,
        hidden_act="silu" if spec.activation == "silu" else "gelu",
        gated_linear_unit=spec.gated_linear_unit,
        add_bias_linear=spec.add_bias_linear,
        add_qkv_bias=spec.add_qkv_bias,
        qk_layernorm=spec.qk_layernorm,
        position_embedding_type=spec.position_embedding,
        compute_dtype="float32",
        params_dtype="float32",
        use_flash_attention=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=spec.qk_layernorm, fused_norm=False),
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_position_embeddings,
        position_embedding_type=spec.position_embedding,
        share_embeddings_and_output_weights=spec.tie_word_embeddings,
    )
    return {name: list(value.shape) for name, value in model.parameters_and_names()}


def specs() -> dict[str, ModelSpec]:
    return {
        case: spec_of(**{"hidden_size": 16, "kv_channels": 4, "num_layers": 2, **changes})
        for case, changes in SPECS.items()
    }


A, G, D, H, F = 6, 2, 3, 5, 7  # heads, groups, size of a head, hidden size, MLP size


def pieces() -> list[np.ndarray]:
    """Rows of q, k, v, gate and up, each number once."""
    numbers = iter(range(10_000))
    return [
        np.array([[next(numbers) for _ in range(H)] for _ in range(rows)], np.float32)
        for rows in (A * D, G * D, G * D, F, F)
    ]


def packed_by_mindformers() -> dict[str, list]:
    """What mindformers' own loader of Hugging Face weights makes of `pieces`, in each of its layouts."""
    from mindformers.parallel_core.utils.model_mixin import TrainModelMixin

    q, k, v, gate, up = pieces()
    mixin = TrainModelMixin()
    found = {
        "per_group": mixin.concat_qkv_interleaved(q, k, v, "linear_q", D, G, A),
        "flat": mixin.concat_qkv_contiguous(q, k, v, "linear_q"),
        "interleaved": mixin.concat_linear_fc1_interleaved(gate, up, "gating", F),
        "concatenated": mixin.concat_linear_fc1_contiguous(gate, up, "gating"),
    }
    return {name: next(iter(table.values())).tolist() for name, table in found.items()}


def main() -> None:
    """Print the shapes of all cases as JSON, in a process whose mindformers context is its own."""
    from mindformers.core.context.build_context import build_context

    build_context(
        {"use_legacy": False, "use_parallel": False, "context": {"device_target": "CPU", "mode": 1}}
    )
    shapes = {case: network_shapes(spec) for case, spec in specs().items()}
    print("FOUND " + json.dumps({"shapes": shapes, "packed": packed_by_mindformers()}))


@pytest.fixture(scope="module")
def mindformers() -> dict:
    pytest.importorskip("mindformers")
    run = subprocess.run(
        [sys.executable, "-m", "tests.weights.test_network_names"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, run.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("FOUND "))


@pytest.mark.parametrize("case", SPECS)
def test_names_and_shapes_are_those_of_mindformers(mindformers: dict, case: str) -> None:
    ours = {name: list(shape) for name, shape in target_names(specs()[case]).items()}
    assert mindformers["shapes"][case] == ours


@pytest.mark.parametrize("qkv", ["per_group", "flat"])
@pytest.mark.parametrize("gate_up", ["interleaved", "concatenated"])
def test_packing_is_that_of_mindformers(mindformers: dict, qkv: str, gate_up: str) -> None:
    spec = spec_of(
        **{**SPECS["llama"], "hidden_size": H, "kv_channels": D, "ffn_hidden_size": F, "num_attention_heads": A,
           "num_query_groups": G}
    )  # fmt: skip
    geometry = Geometry(spec, TargetLayout(qkv, gate_up))  # type: ignore[arg-type]
    q, k, v, gate, up = pieces()
    assert Chain.of(("qkv_separate",), geometry).forward([q, k, v])[0].tolist() == mindformers["packed"][qkv]
    assert (
        Chain.of(("gate_up_separate",), geometry).forward([gate, up])[0].tolist()
        == mindformers["packed"][gate_up]
    )


if __name__ == "__main__":
    main()
