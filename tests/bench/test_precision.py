"""Half precision against float32, on a real tiny run and on made-up traces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from mindferry.checking import precision

VIEW = """
import json, sys
from pathlib import Path
from mindferry.checking import precision
from mindferry.targets.run_directory import RunDirectory
seen = precision.view(RunDirectory(Path(sys.argv[1])), "float16")
Path(sys.argv[2]).write_text(json.dumps(seen.to_json()))
"""


def test_a_float16_norm_is_named(tiny, tmp_path):
    """Activations of some hundreds square beyond float16's 65504 once the norm computes in it."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(tiny / "run", tmp_path / "run", ignore=shutil.ignore_patterns("logs"))
    for path in (tmp_path / "run/model").glob("*.safetensors"):
        tensors = {n: v * (6000 if n.startswith("embedding.") else 1) for n, v in load_file(path).items()}
        save_file(tensors, path)
    yaml = tmp_path / "run/run.yaml"
    yaml.write_text(
        yaml.read_text().replace("layernorm_compute_type: float32", "layernorm_compute_type: float16")
    )
    out = tmp_path / "view.json"
    done = subprocess.run(
        [sys.executable, "-c", VIEW, tmp_path / "run", out], capture_output=True, text=True, check=False
    )
    assert out.is_file(), done.stderr[-2000:]
    assert json.loads(out.read_text())["first_departure"] == "decoder.layers.0.input_layernorm"


def test_float16_of_a_real_run(tiny, tmp_path):
    out = tmp_path / "view.json"
    done = subprocess.run(
        [sys.executable, "-c", VIEW, tiny / "run", out], capture_output=True, text=True, check=False
    )
    assert out.is_file(), done.stderr[-2000:]
    content = json.loads(out.read_text())
    names = [row["name"] for row in content["rows"]]
    assert names[0] == "embedding"
    assert names[-1] == "logits"
    assert "decoder.layers.1.mlp.linear_fc1" in names
    assert content["first_departure"] is None
    # It really was computed in half: nothing is equal, and nothing is far off.
    assert all(1e-5 < row["relative_error"] < 0.01 for row in content["rows"])
    assert all(row["cosine"] > 0.9999 for row in content["rows"])


def test_rows_against_numpy():
    rng = np.random.default_rng(0)
    full = {f"op{i}": rng.standard_normal((4, 64)).astype(np.float32) for i in range(3)}
    half = {name: value.astype(np.float16).astype(np.float32) for name, value in full.items()}
    rows = precision.compare(full, half, "float16")
    assert all(row.good for row in rows)
    a, b = full["op1"].astype(np.float64), half["op1"].astype(np.float64)
    assert rows[1].relative_error == pytest.approx(np.sqrt(((a - b) ** 2).sum() / (a**2).sum()))
    half["op1"] = half["op1"] * 1.01
    half["op2"] = half["op2"].copy()
    half["op2"][0, 0] = np.inf
    seen = precision.Precision("float16", precision.compare(full, half, "float16"), [])
    assert seen.first_departure == "op1"
    assert seen.largest_step == "op1"
    assert not np.isfinite(seen.rows[2].relative_error)
    assert "departs" in seen.table()


def test_compare_command(tmp_path):
    from tests.report.runs import losses, write_run
    from tests.support import run_cli

    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", slope=0.001)
    assert losses(2, 0.1, 0).shape == (2,)
    done = run_cli("compare", one, two, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1
    assert answer["convergence"] == "slower"
    assert answer["findings"][0]["id"] == "convergence.slower"
    assert run_cli("compare", one, one).returncode == 0
    assert run_cli("compare", one, tmp_path / "none").returncode == 2
