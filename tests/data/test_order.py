"""mindformers' GPTDataset shows exactly the samples that the rule, computed with numpy, says."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data.megatron import MegatronWriter, open_megatron
from mindferry.data.order import GPTSampleOrder, blend_order, split_ranges
from mindferry.errors import UsageError

S = 16


def dataset(directory: Path, name: str, documents: int = 60, seed: int = 0) -> Path:
    """Documents of 0 to 50 random tokens."""
    rng = np.random.default_rng(seed)
    writer = MegatronWriter(directory, name, np.uint16)
    for _ in range(documents):
        writer.add(rng.integers(0, 1000, rng.integers(0, 50)))
        writer.end_document()
    writer.finish(directory / name)
    return directory / name


@pytest.fixture(autouse=True)
def _compiler_finds_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """mindformers compiles a helper with `make`, which asks `python3` for the headers of pybind11."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def mindformers_samples(size: int, tmp_path: Path, **config: Any) -> list[dict[str, np.ndarray]]:
    """What the real data loader of a run.yaml yields."""
    from mindformers.dataset.dataloader.blended_megatron_dataloader import BlendedMegatronDatasetDataLoader

    columns = ["input_ids", "labels", "loss_mask", "position_ids"]
    loader = BlendedMegatronDatasetDataLoader(
        datasets_type="GPTDataset",
        sizes=[size, 0, 0],
        config={
            "seq_length": S,
            "create_attention_mask": False,
            "mmap_bin_files": True,
            "path_to_cache": str(tmp_path / "cache"),
            **config,
        },
        column_names=columns,
        shuffle=False,
    )
    return list(loader.create_dict_iterator(num_epochs=1, output_numpy=True))


# One epoch has 88 or so samples; the last epoch is shuffled alone below 80 % of it.
@pytest.mark.parametrize("size", [5, 60, 95, 170, 250])
@pytest.mark.parametrize("seed", [1234, 7])
def test_same_samples_in_the_same_order(tmp_path: Path, size: int, seed: int) -> None:
    prefix = dataset(tmp_path, "d")
    theirs = mindformers_samples(size, tmp_path, seed=seed, data_path=[str(prefix)], split="1, 0, 0")
    ours = GPTSampleOrder(open_megatron(prefix), S, size, seed)
    assert len(theirs) == len(ours) >= size
    for number, row in enumerate(theirs):
        tokens = ours.tokens(number)
        np.testing.assert_array_equal(row["input_ids"], tokens[:-1])
        np.testing.assert_array_equal(row["labels"], tokens[1:])
        np.testing.assert_array_equal(row["loss_mask"], np.ones(S))


def test_both_rules_for_the_last_epoch_are_met(tmp_path: Path) -> None:
    data = open_megatron(dataset(tmp_path, "d"))
    per_epoch = (data.tokens - 1) // S
    assert 70 < per_epoch < 110
    separate = GPTSampleOrder(data, S, per_epoch + 10, 1)
    together = GPTSampleOrder(data, S, per_epoch * 2 - 3, 1)
    assert separate.epochs == together.epochs == 2
    assert separate.order[:per_epoch].max() < per_epoch
    assert together.order[:per_epoch].max() >= per_epoch


def test_split_as_megatron_cuts_it(tmp_path: Path) -> None:
    prefix = dataset(tmp_path, "d")
    data = open_megatron(prefix)
    train, valid, test = split_ranges("70,20,10", len(data.lengths))
    assert (train, valid, test) == (range(42), range(42, 54), range(54, 60))
    theirs = mindformers_samples(40, tmp_path, seed=3, data_path=[str(prefix)], split="70,20,10")
    ours = GPTSampleOrder(data, S, 40, 3, train)
    assert len(theirs) == len(ours)
    for number, row in enumerate(theirs):
        np.testing.assert_array_equal(row["input_ids"], ours.tokens(number)[:-1])
    for text in ("", "0,0,0", "1,2,3,4"):
        with pytest.raises(UsageError, match="split: found"):
            split_ranges(text, 10)


def test_weighted_blend(tmp_path: Path) -> None:
    prefixes = [
        dataset(tmp_path, "a", seed=1),
        dataset(tmp_path, "b", seed=2),
        dataset(tmp_path, "c", seed=3),
    ]
    weights = [0.5, 0.3, 0.2]
    size = 150
    path = [item for pair in zip(weights, map(str, prefixes), strict=True) for item in pair]
    theirs = mindformers_samples(size, tmp_path, seed=9, data_path=list(map(str, path)), split="1, 0, 0")
    which, number, built = blend_order(weights, size)
    ours = [GPTSampleOrder(open_megatron(p), S, n, 9) for p, n in zip(prefixes, built, strict=True)]
    assert len(theirs) == len(which) == sum(built) == 153
    for k, row in enumerate(theirs):
        np.testing.assert_array_equal(row["input_ids"], ours[which[k]].tokens(int(number[k]))[:-1])
    assert np.bincount(which[:100]).tolist() == [50, 30, 20]
    with pytest.raises(UsageError, match="expected positive numbers"):
        blend_order([1.0, 0.0], 4)
