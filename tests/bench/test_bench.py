"""bench on a tiny real run, and its arithmetic on made-up times."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mindferry.checking import bench
from mindferry.spec import ModelSpec
from mindferry.targets.run_directory import RunDirectory
from tests.support import run_cli


def test_command(tiny):
    done = run_cli(
        "bench", tiny / "run", "--against", tiny / "src", "--no-stock", "--no-mfu", "--rounds", "6", "--json"
    )
    answer = json.loads(done.stdout)
    assert answer["command"] == "bench", done.stderr
    assert done.returncode in (0, 1), done.stderr
    rows = {(row["side"], row["name"]): row for row in answer["rows"]}
    ours = {name: row["seconds_median"] for (side, name), row in rows.items() if side == "run"}
    assert set(ours) == {"step", "data", "compute", "forward", "backward", "optimizer", "rest"}
    assert all(row["count"] == 6 for row in answer["rows"])
    # The parts are measured alone and the whole in training; rest is what is left of it.
    summed = ours["forward"] + ours["backward"] + ours["optimizer"] + ours["rest"]
    assert summed == pytest.approx(ours["compute"])
    assert ours["optimizer"] > 0
    assert ("torch", "optimizer") in rows
    assert [row["name"] for row in answer["ratios"]] == ["step vs torch"]
    assert answer["ratios"][0]["verdict"] in ("same", "faster", "slower")
    parts = answer["memory_parts"]
    spec = ModelSpec(**json.loads((tiny / "run/migration.json").read_text())["model"])
    assert parts["gradients"] == 4 * spec.num_parameters()
    assert parts["optimizer"] == 8 * spec.num_parameters()
    assert sum(parts.values()) >= answer["peak_memory_bytes"]
    assert json.loads((tiny / "run/bench.json").read_text())["tokens_per_second"] > 0
    assert not (tiny / "run/metrics.jsonl").exists()
    check_layers(answer)
    check_operators(answer["operators"])


def check_layers(answer):
    names = [row["name"] for row in answer["layers"]]
    assert names == [
        "embedding",
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.final_layernorm",
        "head",
        "loss",
    ]
    assert all(row["forward_seconds"] > 0 and row["both_seconds"] > 0 for row in answer["layers"])
    assert set(answer["layers_sum"]) == {"forward", "both"}
    # Seven graphs to start instead of one, on a machine that others use: no tighter than this.
    assert all(0.3 < share < 10 for share in answer["layers_sum"].values())
    # Without the machine's rates (--no-mfu) there is no roof.
    assert all("roofline" not in row for row in answer["layers"])


def check_operators(found):
    assert found["busy_seconds"] + found["between_seconds"] == pytest.approx(found["step_seconds"])
    assert sum(row["seconds"] for row in found["by_type"]) >= 0.999 * found["busy_seconds"]
    products = next(row for row in found["by_type"] if row["name"] == "MatMul")
    # Four linears of two layers and the head: forward, gradient of the input, gradient of the weight.
    assert products["count"] == 3 * (4 * 2 + 1)
    places = {row["name"]: row for row in found["by_place"]}
    assert {"decoder.layers.0", "decoder.layers.1", "embedding", "head", "loss", "optimizer"} <= set(places)
    assert sum(row["seconds"] for row in places.values()) == pytest.approx(
        sum(row["seconds"] for row in found["by_type"])
    )


def test_a_side_that_fails_is_said(tiny, tmp_path):
    run = RunDirectory(tiny / "run")
    bad = {"model.model_config.layer_spec": "reference"}
    tasks = {"run": bench.run_task(run, 6, tmp_path / "log", bad)}
    sides = bench.measure(tasks, 6, tmp_path)
    assert "needs an Ascend device" in sides["run"].failure
    with pytest.raises(bench.MindferryError, match="could not be measured"):
        bench.check(sides, "run")


def test_decompose_and_sums():
    side = bench.Side("run", {"step": [1.1] * 8, "data": [0.1] * 8, "compute": [1.0] * 8, "forward": [0.1] * 8,
                              "backward": [0.3] * 8, "optimizer": [0.3] * 8})  # fmt: skip
    parts = {name: median for name, (median, _) in bench.decompose(side, accumulation=2).items()}
    assert parts["forward"] == pytest.approx(0.2)
    assert parts["backward"] == pytest.approx(0.4)
    assert parts["optimizer"] == pytest.approx(0.3)
    assert parts["rest"] == pytest.approx(0.1)
    assert bench.does_not_add_up(bench.decompose(side, 2)) == []
    side.series["compute"] = [0.1] * 8
    assert bench.does_not_add_up(bench.decompose(side, 2)) == ["rest: -800.0 ms"]


def test_flops_of_gpt2_small(tmp_path):
    """6 N of the products plus attention, counted layer by layer here."""
    spec = {"family": "gpt2", "vocab_size": 50257, "hidden_size": 768, "num_layers": 12, "num_attention_heads": 12,
            "num_query_groups": 12, "kv_channels": 64, "ffn_hidden_size": 3072, "max_position_embeddings": 1024,
            "position_embedding": "learned_absolute", "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
            "activation": "gelu_tanh", "tie_word_embeddings": True,
            "add_bias_linear": True, "add_qkv_bias": True}  # fmt: skip
    run = RunDirectory(tmp_path)
    run.migration.write_text(json.dumps({"model": spec, "data": {"seq_length": 1024}}))
    matrices = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072) + 50257 * 768
    attention = 12 * 2 * (1024 * 768)  # scores and values, multiply-adds a token
    found = bench.flops_per_token(run)
    assert found == pytest.approx(3 * 2 * (matrices + attention), rel=0.002)
    run.migration.write_text("{")
    assert bench.flops_per_token(run) is None


def test_ratios_stay_quiet_for_noise():
    rng = np.random.default_rng(0)
    a, b = (list(0.1 * rng.lognormal(0, 0.1, 40)) for _ in range(2))
    sides = {"run": bench.Side("run", {"step": a}), "other": bench.Side("other", {"step": b})}
    assert bench.ratios(sides, "run")[0]["verdict"] == "same"
    sides["other"].series["step"] = [2 * value for value in b]
    row = bench.ratios(sides, "run")[0]
    assert row["verdict"] == "faster"
    assert row["ratio"] == pytest.approx(2, rel=0.1)
