"""docs/sources.md states what is measured now, and the gradient comparison can fail."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from mindferry.sources import open_source
from mindferry.weights import convert

from . import proof
from .test_families import build

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_the_table_is_what_is_measured() -> None:
    measured = proof.table(proof.rows())
    assert " no " not in measured
    assert proof.stated(proof.DOCUMENT.read_text("utf-8")) == measured, "run: python -m tests.weights.proof"


def test_wrong_gradients_show() -> None:
    from safetensors.numpy import load_file

    from mindferry.sources.names import canonical

    with tempfile.TemporaryDirectory() as home:
        path = Path(home)
        model = build(path / "src", "qwen3")
        source = open_source(path / "src")
        convert(source, path / "out")
        params = load_file(path / "out/model.safetensors")
        _, gradients = proof.framework(model, lambda name: canonical(name, ["model."]))
        assert proof.gradient_difference(source, params, gradients) < 1e-5
        q, k = (f"layers.0.self_attn.{name}_norm.weight" for name in "qk")
        swapped = {**gradients, q: gradients[k], k: gradients[q]}
        assert proof.gradient_difference(source, params, swapped) > 1e-2
