"""Makes small real sources and runs: transformers writes, MindSpore trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from mindferry.spec import ModelSpec

SEQ_LENGTH = 32


def run_cli(*arguments: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "mindferry", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **kwargs,
    )


def make_source(directory: Path, *, seed: int = 0, **config: Any) -> Path:
    """A tiny Hugging Face GPT-2 with random weights that are not close to their initialisation.

    Biases and norms get random values too: with transformers' zeros and ones, a swap would go unseen.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from mindferry.demo.source import train_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(directory, 300)
    settings = {
        "vocab_size": tokenizer.get_vocab_size(),
        "n_positions": 64,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **config,
    }
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 1:
                parameter.copy_((1.0 if name.endswith("weight") else 0.0) + 0.1 * noise)
            else:
                parameter.copy_(0.1 * noise)
    model.save_pretrained(str(directory), safe_serialization=True)
    return directory


def gpt2_spec(**changes: Any) -> ModelSpec:
    """A small GPT-2 as a ModelSpec."""
    settings = {
        "family": "gpt2",
        "vocab_size": 50,
        "hidden_size": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 64,
        "max_position_embeddings": 8,
        "position_embedding": "learned_absolute",
        "normalization": "LayerNorm",
        "layernorm_epsilon": 1e-5,
        "activation": "gelu_tanh",
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "tie_word_embeddings": False,
    }
    return ModelSpec(**{**settings, **changes})


def make_run(source: Path, corpus: Path, out: Path, **choices: Any) -> Path:
    """Migrate in this process."""
    from mindferry.migration import Choices, migrate

    settings = {"seq_length": SEQ_LENGTH, "batch_size": 4, "steps": 60, "learning_rate": 1e-3, **choices}
    migrate(source, [corpus], out, Choices(**settings))
    return out
