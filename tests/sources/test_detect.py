"""What a path holds: told apart by files, said when there is more than one, refused with the reason."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mindferry.errors import MindferryError, UsageError
from mindferry.sources import open_source
from mindferry.sources.family import families, family_of

from ..weights.test_families import build
from ..weights.test_nanogpt import checkpoint

transformers = pytest.importorskip("transformers")


def test_two_formats_in_one_directory(tmp_path: Path) -> None:
    build(tmp_path, "gpt2")
    checkpoint(tmp_path / "ckpt.pt")
    source = open_source(tmp_path)
    assert source.format == "huggingface"
    assert "holds a Hugging Face model, which was taken, and a nanoGPT checkpoint" in source.warnings[0]


def test_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="no model found") as caught:
        open_source(tmp_path)
    assert "Megatron-LM" in caught.value.remedy


@pytest.mark.parametrize(
    ("found", "reason"),
    [("gptj", "head has a bias"), ("mixtral", "experts"), ("bert", "no decoder"), ("gemma", "add one")],
)
def test_families_that_cannot_be_carried_over_say_why(found: str, reason: str) -> None:
    with pytest.raises(MindferryError, match=reason) as caught:
        family_of(found, "config.json")
    assert "gpt2" in caught.value.remedy


def test_no_family_is_both_supported_and_refused() -> None:
    from mindferry.sources.family import _load

    refused = _load("_refused.yaml")
    assert not set(refused) & {name for family in families().values() for name in family.model_types}
    assert all(isinstance(reason, str) and reason for reason in refused.values())


@pytest.mark.parametrize("value", [10**6, 10**9, 2**62])
@pytest.mark.parametrize("key", ["n_layer", "n_embd", "vocab_size", "n_positions", "n_inner"])
def test_absurd_sizes_are_refused_at_once(tmp_path: Path, key: str, value: int) -> None:
    build(tmp_path, "gpt2")
    config = tmp_path / "config.json"
    changes = {key: value, **({"n_head": 1} if key == "n_embd" else {})}
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    start = time.monotonic()
    with pytest.raises(MindferryError):
        open_source(tmp_path)
    assert time.monotonic() - start < 1.0
