"""Megatron files as the train_dataset of a run.yaml, and the helper that mindformers compiles for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.data.megatron import open_megatron, paths
from mindferry.data.mindrecord import COLUMNS
from mindferry.data.order import GPTSampleOrder, blend_order, split_ranges
from mindferry.data.tokens import check_ids
from mindferry.errors import MindferryError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Places in mindformers' document and sample index.
_INDEX_MAX = 1 << 31

# Seeds of numpy's RandomState, which lays out the order.
SEEDS = range(1 << 32)

# Ids looked at in one go.
_SCANNED = 1 << 22


def megatron_train_dataset(
    parts: Sequence[tuple[float, Path]],
    *,
    seq_length: int,
    samples: int,
    seed: int = 1234,
    split: str = "1, 0, 0",
    cache: Path | str = "./data/index-cache",
    prefetch_size: int = 2,
) -> dict[str, Any]:
    """`train_dataset` that reads .bin/.idx with mindformers' BlendedMegatronDatasetDataLoader.

    Columns and shapes are those of a MindRecord of ours (mindferry.data.mindrecord.COLUMNS). The order of samples is
    Megatron's for the same seed, seq_length, split and `samples` (mindferry.data.order).

    Args:
        parts: (weight, prefix) of each data set; the weights need not sum to 1.
        samples: sequences of the whole run: optimizer steps times global batch size.
        split: shares of train, valid and test, cut by sequences of the .idx.
        cache: directory for mindformers' index files, made by it; relative to run.yaml.

    Raises:
        UsageError: no part, a missing file, a weight that is not positive, too few tokens or samples.
        MindferryError: a damaged index.
    """
    if not parts:
        raise UsageError("no Megatron data set given", remedy="give at least one prefix")
    if samples <= 0:
        raise UsageError(f"samples: found {samples}, expected a positive number")
    if seed not in SEEDS:
        raise UsageError(f"seed: found {seed}, expected 0 to {SEEDS[-1]}", id="megatron.seed")
    if seq_length < 2:  # mindformers' helper ends the process
        raise UsageError(
            f"seq_length: found {seq_length}, expected at least 2 with Megatron files", id="data.seq-length"
        )
    blend_order([weight for weight, _ in parts], 1)  # checks the weights
    names = []
    for _, prefix in parts:
        _check_part(prefix, seq_length, split, samples)
        names.append(str(paths(prefix)[0].with_suffix("").resolve()))
    total = sum(weight for weight, _ in parts)
    if len(names) == 1:
        data_path = names
    else:
        data_path = [
            item
            for (weight, _), name in zip(parts, names, strict=True)
            for item in (f"{weight / total:.12g}", name)
        ]
    return {
        "data_loader": {
            "type": "BlendedMegatronDatasetDataLoader",
            "datasets_type": "GPTDataset",
            "sizes": [samples, 0, 0],
            "shuffle": False,  # the order is in the data set's own index
            "config": {
                "seed": seed,
                "seq_length": seq_length,
                "data_path": data_path,
                "split": split,
                "path_to_cache": str(cache),
                "mmap_bin_files": True,
                "create_attention_mask": False,
                "create_compressed_eod_mask": False,
                "reset_position_ids": False,
                "reset_attention_mask": False,
                "eod_mask_loss": False,
                # Neither id occurs, so nothing is masked: a token that closes a document is trained like any other.
                "eod": -1,
                "pad": -1,
            },
        },
        "input_columns": list(COLUMNS),
        "construct_args_key": list(COLUMNS),
        "num_parallel_workers": 1,
        "python_multiprocessing": False,
        "drop_remainder": True,
        "repeat": 1,
        "prefetch_size": prefetch_size,
        "seed": seed,
    }


@dataclass(frozen=True)
class Blend:
    """The Megatron files of a run.yaml as its loader mixes them, read with numpy alone.

    Attributes:
        parts: (share, prefix); the shares sum to 1.
        seq_length: tokens of a sample.
        samples: how many the run asks for.
        seed, split: as Megatron's.
    """

    parts: tuple[tuple[float, Path], ...]
    seq_length: int
    samples: int
    seed: int
    split: str

    @classmethod
    def of(cls, loader: Mapping[str, Any], root: Path = Path()) -> Blend:
        """From run.yaml's train_dataset.data_loader; relative prefixes start at `root`.

        Raises:
            UsageError: several prefixes without a weight before each, or a weight that is not positive.
        """
        config = loader["config"]
        where = "run.yaml: train_dataset.data_loader.config.data_path"
        words = [str(word).strip() for word in config["data_path"]]
        if len(words) == 1:
            words = ["1", *words]
        try:
            if len(words) % 2:
                raise ValueError
            weights = [float(word) for word in words[::2]]
        except ValueError:
            raise UsageError(
                f"{where}: found {config['data_path']}, expected one prefix, or a weight before each",
                remedy="write it as Megatron does: ['0.7', 'data/a', '0.3', 'data/b']",
                id="megatron.blend",
            ) from None
        blend_order(weights, 1)  # checks the weights
        prefixes = [paths(root / word)[0].with_suffix("") for word in words[1::2]]
        parts = tuple((w / sum(weights), p) for w, p in zip(weights, prefixes, strict=True))
        return cls(parts, config["seq_length"], loader["sizes"][0], config["seed"], config["split"])

    def check(self) -> None:
        """Open every part.

        Raises:
            UsageError: a missing file, or fewer tokens in the train split than one sample.
            MindferryError: a damaged index.
        """
        for _, prefix in self.parts:
            _check_part(prefix, self.seq_length, self.split, self.samples)

    def identity(self) -> list[Any]:
        """What the order of the samples follows from; plain data."""
        parts = [[share, open_megatron(prefix).tokens] for share, prefix in self.parts]
        return [parts, self.seq_length, self.samples, self.seed, self.split]


class BlendedSamples:
    """The samples of a Blend in the order of training; number k is tokens [seq_length + 1]."""

    def __init__(self, blend: Blend) -> None:
        self._blend = blend
        self._which, self._number, built = None, None, [blend.samples]
        if len(blend.parts) > 1:
            self._which, self._number, built = blend_order([share for share, _ in blend.parts], blend.samples)
        self._orders = []
        for (_, prefix), size in zip(blend.parts, built, strict=True):
            data = open_megatron(prefix)
            train = split_ranges(blend.split, len(data.lengths))[0]
            self._orders.append(GPTSampleOrder(data, blend.seq_length, size, blend.seed, train))

    def __len__(self) -> int:
        return self._blend.samples

    def __getitem__(self, k: int) -> NDArray[np.int64]:
        if not 0 <= k < len(self):
            raise IndexError(k)
        if self._which is None or self._number is None:
            return self._orders[0].tokens(k)
        return self._orders[self._which[k]].tokens(int(self._number[k]))


def _check_part(prefix: Path, seq_length: int, split: str, samples: int) -> None:
    """Whether the train split has a sample, and the index of `samples` fits the int32 of mindformers' helper."""
    data = open_megatron(prefix)
    train = split_ranges(split, len(data.lengths))[0]
    tokens = int(data.lengths[train.start : train.stop].sum(dtype="int64"))
    if tokens < seq_length + 1:
        raise UsageError(
            f"{prefix}: {tokens} tokens in train of split {split!r}, expected at least {seq_length + 1}",
            remedy="give more data or another split; nanoGPT's train.bin is one sequence, which no split divides",
            id="data.too-short",
        )
    epochs = -(-(samples * seq_length + 1) // tokens)
    if max(samples, epochs * len(train)) >= _INDEX_MAX:
        raise UsageError(
            f"{prefix}: {samples} samples are {epochs} epochs of {len(train)} sequences, expected an index of fewer "
            f"than {_INDEX_MAX} places",
            remedy="ask for fewer samples (steps x sequences a step)",
            id="megatron.sizes",
        )


def check_vocabulary(
    prefix: Path, vocab_size: int, advance: Callable[[int], None] = lambda read: None
) -> None:
    """Look at every id of a Megatron data set; `advance` is told the bytes read.

    Raises:
        MindferryError: names the first id outside 0..vocab_size-1, its document and its position.
    """
    data = open_megatron(prefix)
    if data.contiguous:
        stream = data.stream()
        for start in range(0, len(stream), _SCANNED):
            part = stream[start : start + _SCANNED]
            if len(part) and not (part.min() >= 0 and part.max() < vocab_size):
                break
            advance(part.nbytes)
        else:
            return
    for i, ids in enumerate(data.iter_documents()):
        check_ids(ids, vocab_size, f"{data.bin}: document {i}")


def compile_megatron_helper(directory: Path | None = None) -> Path:
    """Compile mindformers' C++ helper for this very Python, if that has not been done; returns its path.

    mindformers runs `make`, which asks whatever `python3` and `python3-config` stand first on the PATH, and ends the
    process when that fails. `directory` is its blended_datasets package (default: the installed one).

    Raises:
        MindferryError: no compiler, no pybind11, or the compiler's error.
    """
    if directory is None:
        import importlib.util

        spec = importlib.util.find_spec("mindformers")
        if spec is None or not spec.submodule_search_locations:
            raise MindferryError(
                "mindformers is not installed", remedy="pip install mindferry", id="env.missing"
            )
        directory = Path(spec.submodule_search_locations[0]) / "dataset" / "blended_datasets"
    source = directory / "helpers.cpp"
    target = directory / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return target
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    headers = _pybind11_headers()
    if compiler is None or headers is None:
        missing = "a C++ compiler" if compiler is None else "pybind11"
        raise MindferryError(
            f"{source}: {missing} is missing to compile it",
            cause="mindformers reads Megatron files with a helper that it compiles at first use",
            remedy="install g++ (apt-get install g++)" if compiler is None else "pip install pybind11",
            id="megatron.helper",
        )
    building = target.with_name(f".{target.name}.{os.getpid()}")
    includes = [f"-I{headers}", f"-I{sysconfig.get_paths()['include']}"]
    words = [compiler, "-O3", "-shared", "-std=c++17", "-fPIC", *includes, str(source), "-o", str(building)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            raise MindferryError(
                f"{source}: does not compile for Python {sys.version.split()[0]}",
                evidence=done.stderr[-2000:],
                remedy="see the evidence; usually the headers of Python are missing (apt-get install python3-dev)",
                id="megatron.helper",
            )
        os.replace(building, target)
    except OSError as err:
        raise MindferryError(
            f"{target}: cannot be written: {err.strerror}",
            remedy="make it once with the right to write there",
        ) from None
    finally:
        building.unlink(missing_ok=True)
    return target


def _pybind11_headers() -> str | None:
    try:
        import pybind11

        return str(pybind11.get_include())
    except ImportError:
        return None
