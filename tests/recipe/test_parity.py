"""verify's training steps in PyTorch follow the run's recipe: groups, clipping, accumulation, averaging."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.checking import parity
from mindferry.checking.sides import Batch
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory

from .ragged import ragged_run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source, and a run whose rows have unequal numbers of unmasked tokens."""
    return ragged_run(tmp_path_factory.mktemp("parity"), steps=12)


def changed(run: Path, out: Path, **sections: Any) -> Path:
    shutil.copytree(run, out)
    content = run_yaml.read(out / "run.yaml")
    for section, values in sections.items():
        content[section].update(values)
    (out / "run.yaml").write_text(run_yaml.dump(content))
    return out


RECIPES: dict[str, dict[str, Any]] = {
    "every tensor decays": {"optimizer": {"type": "AdamWDecayAll", "weight_decay": 20.0}},
    "mean of means": {"runner_config": {"batch_size": 2, "gradient_accumulation_steps": 4}},
    "mean over tokens": {
        "runner_config": {"batch_size": 2, "gradient_accumulation_steps": 4},
        "runner_wrapper": {"calculate_per_token_loss": True, "max_grad_norm": 0.3},
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_both_sides_follow_the_recipe(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    source, run = pair
    made = changed(run, tmp_path / "run", **RECIPES[name])
    found = parity.train_both(RunDirectory.open(made), source, steps=10)
    assert found.max_loss_diff <= 1e-5, found


def test_what_was_ignored_before_is_seen(pair: tuple[Path, Path]) -> None:
    """Each of the recipes above has losses of its own, so a side that passes over it would part."""
    import torch
    from transformers import GPT2LMHeadModel

    source, run = pair
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(6):
        ids = rng.integers(0, 290, (8, 33)).astype(np.int32)
        mask = (np.arange(32) < rng.integers(1, 33, 8)[:, None]).astype(np.int32)
        positions = np.tile(np.arange(32, dtype=np.int32), (8, 1))
        batches.append(Batch(ids[:, :-1], ids[:, 1:], mask, positions))

    def losses(**sections: Any) -> np.ndarray:
        content = run_yaml.read(run / "run.yaml")
        for section, values in sections.items():
            content[section].update(values)
        torch.manual_seed(0)
        model = GPT2LMHeadModel.from_pretrained(source).eval()
        return np.array(parity.train_torch(model, content, batches))

    plain = losses(optimizer={"weight_decay": 20.0})
    assert np.abs(losses(**RECIPES["every tensor decays"]) - plain).max() > 1e-3
    means = losses(**RECIPES["mean of means"])
    assert np.abs(losses(**RECIPES["mean over tokens"]) - means).max() > 1e-3
    tight = losses(runner_wrapper={"max_grad_norm": 0.01})
    unclipped = losses(runner_wrapper={"use_clip_grad": False, "max_grad_norm": 0.01})
    assert np.abs(tight - unclipped).max() > 1e-6
