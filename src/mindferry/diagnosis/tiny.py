"""A run directory small enough to train in a second: GPT-2 of two layers on a made-up language.

The language is a first-order Markov chain over the vocabulary with a handful of likely successors for each
token, so that a healthy run's loss falls from ln(vocab_size) towards the chain's entropy within tens of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.spec import ModelSpec, Precision, Recipe, Schedule
from mindferry.targets import run_yaml
from mindferry.weights import target_names

SPEC = ModelSpec(
    family="gpt2",
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=64,
    max_position_embeddings=16,
    position_embedding="learned_absolute",
    normalization="LayerNorm",
    layernorm_epsilon=1e-5,
    activation="gelu_tanh",
    add_bias_linear=True,
    add_qkv_bias=True,
    tie_word_embeddings=True,
    eos_token_id=0,
)


@dataclass(frozen=True)
class Tiny:
    """What differs between tiny runs. Steps and batches in sequences of `seq_length` tokens."""

    spec: ModelSpec = SPEC
    seq_length: int = 16
    batch_size: int = 8
    sequences: int = 256
    steps: int = 24
    learning_rate: float = 3e-3
    kind: str = "cosine"
    warmup_steps: int = 4
    precision: Precision = field(default_factory=Precision)
    loss_scale: float = 1.0
    seed: int = 0


def tokens(tiny: Tiny) -> np.ndarray:
    """[sequences, seq_length + 1] int32, ids 1 .. vocab_size - 1 (0 is eos and stands at random ends)."""
    rng = np.random.default_rng(tiny.seed)
    vocab = tiny.spec.vocab_size
    successors = np.random.default_rng(7).integers(1, vocab, size=(vocab, 3))
    ids = np.empty((tiny.sequences, tiny.seq_length + 1), np.int32)
    ids[:, 0] = rng.integers(1, vocab, size=tiny.sequences)
    for at in range(1, ids.shape[1]):
        ids[:, at] = successors[ids[:, at - 1], rng.integers(0, 3, size=tiny.sequences)]
    ids[rng.random(ids.shape) < 0.01] = 0
    return ids


def rows(ids: np.ndarray) -> dict[str, np.ndarray]:
    """The four columns of a healthy run, each [sequences, seq_length] int32."""
    length = ids.shape[1] - 1
    return {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "loss_mask": np.ones((len(ids), length), np.int32),
        "position_ids": np.broadcast_to(np.arange(length, dtype=np.int32), (len(ids), length)),
    }


def write_mindrecord(path: Path, columns: dict[str, np.ndarray]) -> None:
    """Write the columns, row by row, as one MindRecord file."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), 1, overwrite=True)
    schema = {name: {"type": "int32", "shape": [int(value.shape[1])]} for name, value in columns.items()}
    writer.add_schema(schema, "tiny")
    count = len(next(iter(columns.values())))
    writer.write_raw_data(
        [{name: np.ascontiguousarray(value[row]) for name, value in columns.items()} for row in range(count)]
    )
    writer.commit()


def weights(tiny: Tiny) -> dict[str, np.ndarray]:
    """Parameters drawn as GPT-2 draws them: normal(0, 0.02), norms 1 and 0, biases 0."""
    rng = np.random.default_rng(tiny.seed + 1)
    out = {}
    for name, shape in target_names(tiny.spec).items():
        if name.endswith("gamma"):
            out[name] = np.ones(shape, np.float32)
        elif name.endswith(("beta", "bias")):
            out[name] = np.zeros(shape, np.float32)
        else:
            out[name] = (rng.standard_normal(shape) * tiny.spec.init_method_std).astype(np.float32)
    return out


def make_run(
    root: Path,
    tiny: Tiny | None = None,
    *,
    columns: dict[str, np.ndarray] | None = None,
    params: dict[str, np.ndarray] | None = None,
    changes: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:
    """Write a run directory; `changes` sets dotted keys of run.yaml after it is built."""
    from safetensors.numpy import save_file

    tiny = replace(tiny or Tiny(), **fields)
    recipe = Recipe(
        schedule=Schedule(
            kind=tiny.kind,
            learning_rate=tiny.learning_rate,
            warmup_steps=tiny.warmup_steps,
            total_steps=tiny.steps,
        ),
        seq_length=tiny.seq_length,
        batch_size=tiny.batch_size,
        precision=tiny.precision,
        loss_scale=tiny.loss_scale,
    )
    content = run_yaml.build(tiny.spec, recipe, steps_per_epoch=tiny.sequences // tiny.batch_size)
    for dotted, value in (changes or {}).items():
        node = content
        *path, last = dotted.split(".")
        for part in path:
            node = node[part]
        node[last] = value
    (root / "data").mkdir(parents=True)
    (root / "model").mkdir()
    (root / "run.yaml").write_text(run_yaml.dump(content))
    save_file(params or weights(tiny), root / "model/model.safetensors")
    write_mindrecord(root / "data/train.mindrecord", columns or rows(tokens(tiny)))
    return root
