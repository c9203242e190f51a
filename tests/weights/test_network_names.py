"""`target_names` against the parameters of mindformers' own GPTModel, built here from its own layer spec."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindferry.spec import ModelSpec
from mindferry.weights import target_names

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


def main() -> None:
    """Print the shapes of all cases as JSON, in a process whose mindformers context is its own."""
    from mindformers.core.context.build_context import build_context

    build_context(
        {"use_legacy": False, "use_parallel": False, "context": {"device_target": "CPU", "mode": 1}}
    )
    print("SHAPES " + json.dumps({case: network_shapes(spec) for case, spec in specs().items()}))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[int]]]:
    pytest.importorskip("mindformers")
    run = subprocess.run(
        [sys.executable, "-m", "tests.weights.test_network_names"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("SHAPES ")]
    assert lines, run.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("SHAPES "))


@pytest.mark.parametrize("case", SPECS)
def test_names_and_shapes_are_those_of_mindformers(built: dict, case: str) -> None:
    ours = {name: list(shape) for name, shape in target_names(specs()[case]).items()}
    assert built[case] == ours


if __name__ == "__main__":
    main()
