"""The fused spec inside mindformers' GPTModel against the portable one: same tree, loss, logits, gradients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindferry.kernels import has_bf16


def compare(mode, env=None, **extra):
    # A process each: MindSpore's mode and mindformers' context belong to the process.
    program = [sys.executable, str(Path(__file__).with_name("tiny_model.py")), str(mode), json.dumps(extra)]
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), done.stdout + done.stderr


@pytest.mark.parametrize("mode", [0, 1], ids=["graph", "pynative"])
def test_fused_is_portable_in_float32(lib, mode):
    extra = {"activation": "gelu_erf", "tie_word_embeddings": False} if mode else {}
    found, _ = compare(mode, **extra)
    assert found["classes"] == ["GPTModel", "FusedGPTModel"]
    assert found["same_tree"]
    assert found["loss"] < 1e-5
    assert found["logits"] < 1e-5
    assert found["grads"] < 1e-5
    assert "token id 106 at [1, 2] is outside [0, 101)" in found["error"]


LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "num_heads": 4,
    "num_query_groups": 2,
    "tie_word_embeddings": False,
}
NEOX = {"position_embedding_type": "rope", "activation": "gelu_erf", "parallel_residual": True}


@pytest.mark.parametrize(
    "family",
    [LLAMA, {**LLAMA, "qk_layernorm": True, "head_dim": 20}, {**NEOX, "rotary_percent": 0.5}],
    ids=["llama", "qwen3", "gpt_neox"],
)
def test_fused_is_portable_for_other_families(lib, family):
    found, _ = compare(1, **family)
    assert found["classes"] == ["GPTModel", "FusedGPTModel"]
    assert found["same_tree"]
    assert max(found["loss"], found["logits"], found["grads"]) < 1e-5


@pytest.mark.skipif(not has_bf16(), reason="this CPU has no bfloat16 products")
def test_fused_in_bfloat16_is_near_float32(lib):
    found, _ = compare(1, compute_dtype="bfloat16")
    assert found["loss"] < 1e-3
    assert found["logits"] < 2e-2
    assert found["grads"] < 3e-2


def test_without_a_compiler_portable_takes_over_with_a_warning(tmp_path):
    found, said = compare(1, num_layers=1, env={"CXX": "no-such-compiler", "MINDFERRY_CACHE": str(tmp_path)})
    assert found["classes"] == ["GPTModel", "GPTModel"]
    assert "layer_spec fused is not available, using portable: no C++ compiler found" in said
