"""Run directories as migrate and train leave them, with curves of known shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def run_yaml_text() -> str:
    """A real run.yaml of a tiny GPT-2."""
    from mindferry.spec import ModelSpec, OptimizerSpec, Recipe, Schedule
    from mindferry.targets import run_yaml

    spec = ModelSpec(
        family="gpt2", vocab_size=300, hidden_size=48, num_layers=2, num_attention_heads=4, num_query_groups=4,
        kv_channels=12, ffn_hidden_size=192, max_position_embeddings=64, position_embedding="learned_absolute",
        normalization="LayerNorm", layernorm_epsilon=1e-5, activation="gelu_tanh", tie_word_embeddings=True,
        add_bias_linear=True, add_qkv_bias=True,
    )  # fmt: skip
    schedule = Schedule(kind="linear", learning_rate=1e-3, total_steps=300)
    recipe = Recipe(optimizer=OptimizerSpec(), schedule=schedule, seq_length=32, batch_size=4)
    return run_yaml.dump(run_yaml.build(spec, recipe, steps_per_epoch=7, layer_spec="portable", device="CPU"))


def layers(nasty: str) -> list[dict]:
    """As bench.json has them: an embedding without a roof, a layer at half of it, another bound by memory."""
    roof = {"flops": 3e8, "roof_flops_per_second": 1e11, "achieved_flops_per_second": 5e10, "share_of_roof": 0.5,
            "intensity": 40.0, "bound": "compute"}  # fmt: skip
    slow = {**roof, "intensity": 2.0, "roof_flops_per_second": 2e10, "achieved_flops_per_second": 2e9,
            "share_of_roof": 0.1, "bound": "memory"}  # fmt: skip
    return [
        {"name": f"embedding{nasty}", "forward_seconds": 1e-3, "both_seconds": 5e-4},
        {"name": "decoder.layers.0", "forward_seconds": 2e-3, "both_seconds": 6e-3, "roofline": roof},
        {"name": "head", "forward_seconds": 5e-2, "both_seconds": 0.15, "roofline": slow},
    ]


def losses(steps: int, slope: float, seed: int, noise: float = 0.05) -> np.ndarray:
    """[steps]: exponential fall from 6 to 2 with normal noise."""
    wobble = np.random.default_rng(seed).normal(0, noise, steps)
    return 2 + 4 * np.exp(-slope * np.arange(steps)) + wobble


def write_run(
    root: Path,
    *,
    slope: float = 0.002,
    seconds: float = 0.1,
    memory: int = 500 << 20,
    seed: int = 0,
    nasty: str = "",
    verify: bool = False,
    bench: bool = False,
    steps: int = 300,
) -> Path:
    root.mkdir(parents=True)
    (root / "run.yaml").write_text(run_yaml_text(), encoding="utf-8")
    times = seconds * np.random.default_rng(seed + 100).lognormal(0, 0.05, steps)
    with open(root / "metrics.jsonl", "w", encoding="utf-8") as handle:
        for i, loss in enumerate(losses(steps, slope, seed)):
            record = {"step": i + 1, "loss": loss, "lr": 1e-3 * (1 - i / steps), "grad_norm": 1 + loss / 10,
                      "data_time": 0.001, "compute_time": times[i], "step_time": times[i] + 0.001,
                      "tokens_per_second": 128 / times[i], "peak_memory_bytes": memory}  # fmt: skip
            handle.write(json.dumps(record) + "\n")
    name = nasty or "transformer.wte.weight"
    migration = {
        "source": {"path": f"gpt2{nasty}", "format": "huggingface", "family": "gpt2"},
        "model": {"family": "gpt2", "hidden_size": 48, "num_layers": 2},
        "parameters": 123456,
        "config": [{"source_key": "n_embd", "source_value": 48, "target_key": f"hidden_size{nasty}",
                    "target_value": 48, "note": ""}],
        "recipe": [{"key": "batch_size", "value": 4, "from": "command line"}],
        "target_defaults_that_differ": [{"target_key": "position_embedding_type", "target_default": "rope",
                                         "value": "learned_absolute", "note": nasty}],
        "weights": {"used": [{"source": name}], "ignored": [], "created": []},
        "data": {"tokens": 1000, "documents": 3, "sequences": 31, "seq_length": 32},
        "warnings": [nasty] if nasty else [],
    }  # fmt: skip
    (root / "migration.json").write_text(json.dumps(migration), encoding="utf-8")
    rows = [
        {"name": f"decoder.layers.{i}{nasty}", "max_abs_diff": 1e-7 * (i + 1), "max_rel_diff": 1e-7}
        for i in range(2)
    ]
    if verify:
        content = {"verdict": "good", "aligned": True, "layers": rows, "gradients": rows, "first_divergence": None,
                   "training": {"steps": 50, "max_loss_diff": 2e-6}}  # fmt: skip
        half = [{"name": f"embedding{nasty}", "relative_error": 2e-4, "cosine": 1.0, "limit": 2e-3}]
        content["precision"] = {"dtype": "float16", "rows": half, "first_departure": None}
        (root / "verify.json").write_text(json.dumps(content), encoding="utf-8")
    if bench:
        tried = [
            {
                "change": "amp O2",
                "decision": "reverted",
                "step_seconds": 0.1,
                "peak_memory_bytes": 1e9,
                "why": "slow",
            }
        ]
        (root / "tune.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tried), encoding="utf-8")
        content = {
            "rows": [{"side": "run", "name": "step", "seconds_median": 0.1, "seconds_spread": 0.01}],
            "ratios": [
                {"name": "step vs portable", "ratio": 1.5, "verdict": "faster", "memory_verdict": "same"}
            ],
            "layers": layers(nasty),
            "gemm_flops_per_second": 1e11,
            "memory_bytes_per_second": 1e10,
            "operators": {
                "by_type": [{"name": f"MatMul{nasty}", "count": 27.0, "seconds": 0.02, "share": 0.2}],
                "by_place": [{"name": "decoder.layers.0", "count": 90.0, "seconds": 0.01, "share": 0.1}],
                "between_seconds": 0.03,
            },
            "memory_parts": {"parameters": 2e8, "gradients": 1e8, "optimizer": 2e8},
        }
        (root / "bench.json").write_text(json.dumps(content), encoding="utf-8")
    return root
