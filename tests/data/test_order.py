"""mindformers' GPTDataset shows exactly the samples that the rule, computed with numpy, says."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data.blend import compile_megatron_helper, megatron_train_dataset
from mindferry.data.megatron import MegatronWriter, open_megatron
from mindferry.data.mindrecord import COLUMNS
from mindferry.data.order import GPTSampleOrder, blend_order, split_ranges
from mindferry.errors import MindferryError, UsageError

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


def by_the_book(
    documents: list[np.ndarray], seq_length: int, samples: int, seed: int
) -> tuple[np.ndarray, bool]:
    """Megatron's rule in its plainest form, without any code of ours: all tokens laid end to end, and cut.

    Returns (samples [n, seq_length + 1] in the order of training, whether the last epoch is shuffled alone).
    """
    tokens = sum(map(len, documents))
    epochs = 1
    while (epochs * tokens - 1) // seq_length < samples:
        epochs += 1
    state = np.random.RandomState(seed)
    whole_epochs = ((epochs - 1) * tokens - 1) // seq_length
    alone = epochs > 1 and samples - whole_epochs < int(0.8 * ((tokens - 1) // seq_length))
    laid: list[int] = []
    for count in (epochs - 1, 1) if alone else (epochs,):
        numbers = np.asarray(list(range(len(documents))) * count, np.int32)
        state.shuffle(numbers)
        laid += [int(token) for number in numbers for token in documents[number]]
    count = (len(laid) - 1) // seq_length
    order: list[int] = []
    for part in ((0, whole_epochs), (whole_epochs, count)) if alone else ((0, count),):
        numbers = np.arange(*part, dtype=np.uint32)
        state.shuffle(numbers)
        order += numbers.tolist()
    rows = [laid[k * seq_length : (k + 1) * seq_length + 1] for k in order]
    return np.asarray(rows), alone


def test_random_settings_three_ways(tmp_path: Path) -> None:
    """The rule in plain form, mindferry.data.order and mindformers itself, for 25 random corpora."""
    rng = np.random.default_rng(99)
    ruled = []
    for number in range(25):
        length = int(rng.integers(2, 40))
        dtype = [np.uint16, np.int32][number % 2]
        ids = [rng.integers(0, 60_000, rng.integers(0, 90)) for _ in range(rng.integers(1, 30))]
        ids.append(rng.integers(0, 60_000, length + 2))  # enough for one sample
        writer = MegatronWriter(tmp_path, f"r{number}", dtype)
        for document in ids:
            writer.add(document)
            writer.end_document()
        writer.finish(tmp_path / f"r{number}")
        samples, seed = int(rng.integers(1, 300)), int(rng.integers(0, 2**31))
        expected, alone = by_the_book(ids, length, samples, seed)
        ruled.append(alone)
        data = open_megatron(tmp_path / f"r{number}")
        ours = GPTSampleOrder(data, length, samples, seed)
        assert len(ours) == len(expected) >= samples
        np.testing.assert_array_equal(np.stack([ours.tokens(k) for k in range(len(ours))]), expected)
        theirs = mindformers_samples(
            samples,
            tmp_path,
            seed=seed,
            data_path=[str(data.bin.with_suffix(""))],
            split="1",
            seq_length=length,
        )
        np.testing.assert_array_equal(np.stack([row["input_ids"] for row in theirs]), expected[:, :-1])
        np.testing.assert_array_equal(np.stack([row["labels"] for row in theirs]), expected[:, 1:])
    assert 3 < sum(ruled) < 22  # both rules for the last epoch were met


def test_documents_of_several_sequences_are_cut_by_sequence(tmp_path: Path) -> None:
    """Megatron shuffles and splits sequences, not documents; only one who writes sentences sees the difference."""
    lengths = [5, 20, 1, 40, 7, 30]
    ids = np.arange(sum(lengths), dtype="<u2")
    ids.tofile(tmp_path / "s.bin")
    offsets = 2 * np.concatenate([[0], np.cumsum(lengths)[:-1]])
    (tmp_path / "s.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 6, 3)
        + np.asarray(lengths, "<i4").tobytes()
        + offsets.astype("<i8").tobytes()
        + np.asarray([0, 2, 6], "<i8").tobytes()
    )
    parts = np.split(ids.astype(np.int64), np.cumsum(lengths)[:-1])
    for split, count in (("1", 6), ("4,2", 4)):
        expected, _ = by_the_book(parts[:count], S, 20, 11)
        theirs = mindformers_samples(20, tmp_path, seed=11, data_path=[str(tmp_path / "s")], split=split)
        np.testing.assert_array_equal(np.stack([row["input_ids"] for row in theirs]), expected[:, :-1])
        ours = GPTSampleOrder(open_megatron(tmp_path / "s"), S, 20, 11, split_ranges(split, 6)[0])
        np.testing.assert_array_equal(np.stack([ours.tokens(k) for k in range(len(ours))]), expected)


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


def test_train_dataset_of_a_run(tmp_path: Path) -> None:
    """The block for run.yaml, built by mindformers' own CausalLanguageModelDataset: batches in Megatron's order."""
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig

    compile_megatron_helper()
    prefixes = [dataset(tmp_path, "a", seed=1), dataset(tmp_path, "b", seed=2)]
    samples, batch = 64, 4
    block = megatron_train_dataset(
        [(3, prefixes[0]), (1, prefixes[1])], seq_length=S, samples=samples, seed=5, cache=tmp_path / "cache"
    )
    dataset_config = MindFormerConfig(**block, batch_size=batch, numa_enable=False)
    rows = list(
        CausalLanguageModelDataset(dataset_config=dataset_config).create_dict_iterator(
            num_epochs=1, output_numpy=True
        )
    )
    which, number, built = blend_order([3, 1], samples)
    orders = [GPTSampleOrder(open_megatron(p), S, n, 5) for p, n in zip(prefixes, built, strict=True)]
    assert len(rows) >= samples // batch
    for step, row in enumerate(rows[: samples // batch]):
        assert {name: value.dtype for name, value in row.items()} == dict.fromkeys(COLUMNS, np.dtype("int32"))
        for k in range(batch):
            tokens = orders[which[step * batch + k]].tokens(int(number[step * batch + k]))
            np.testing.assert_array_equal(row["input_ids"][k], tokens[:-1])
            np.testing.assert_array_equal(row["labels"][k], tokens[1:])
        np.testing.assert_array_equal(row["position_ids"], np.tile(np.arange(S), (batch, 1)))


def test_train_dataset_refuses(tmp_path: Path) -> None:
    prefix = dataset(tmp_path, "a")
    good: dict[str, Any] = {"seq_length": S, "samples": 8}
    for parts, changed, message in (
        ([], {}, "no Megatron data set given"),
        ([(0.0, prefix)], {}, "expected positive numbers"),
        ([(1.0, prefix)], {"samples": 0}, "samples: found 0"),
        ([(1.0, prefix)], {"samples": 10**12}, "expected an index of fewer than 2147483648 places"),
        ([(1.0, prefix)], {"seed": -1}, "seed: found -1, expected 0 to 4294967295"),
        ([(1.0, prefix)], {"seed": 1 << 32}, "seed: found 4294967296"),
        ([(float("inf"), prefix)], {}, "expected positive numbers"),
        ([(float("nan"), prefix)], {}, "expected positive numbers"),
        # one token a sample ends the process in mindformers' helper
        ([(1.0, prefix)], {"seq_length": 1}, "seq_length: found 1, expected at least 2"),
        ([(1.0, prefix)], {"seq_length": 1 << 20}, "expected at least 1048577"),
        ([(1.0, prefix)], {"split": "0,1,0"}, "0 tokens in train"),
        ([(1.0, tmp_path / "none")], {}, r"none\.bin: no such file"),
    ):
        with pytest.raises(UsageError, match=message):
            megatron_train_dataset(parts, **(good | changed))


def test_the_helper_is_compiled_for_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.machinery
    import importlib.util
    import shutil

    spec = importlib.util.find_spec("mindformers")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "dataset/blended_datasets/helpers.cpp"
    shutil.copy(source, tmp_path)
    made = compile_megatron_helper(tmp_path)
    assert made.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
    loaded = importlib.util.spec_from_file_location("helpers", made)
    assert loaded is not None
    assert loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    index = module.build_sample_idx(
        np.asarray([5, 6], np.int32), np.asarray([1, 0], np.int32), 3, 1, 11, True, 1
    )
    assert index.tolist() == [[0, 0], [0, 3], [1, 0], [1, 3]]
    before = made.stat().st_mtime_ns
    assert compile_megatron_helper(tmp_path).stat().st_mtime_ns == before
    made.unlink()
    (tmp_path / "helpers.cpp").write_text("this is no C++")
    with pytest.raises(MindferryError, match="does not compile"):
        compile_megatron_helper(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["helpers.cpp"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MindferryError, match=r"a C\+\+ compiler is missing"):
        compile_megatron_helper(tmp_path)
