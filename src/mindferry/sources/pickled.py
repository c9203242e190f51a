"""Reads what `torch.save` wrote, through PyTorch's weights-only unpickler and nothing else.

A pickle can run any code. The weights-only unpickler builds tensors and plain containers, and the few
classes named here; everything else is refused by name. There is no switch to load such a file anyway.
"""

from __future__ import annotations

import argparse
import pickle
import re
import types
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mindferry.errors import MindferryError
from mindferry.weights.header import damaged, valid_name
from mindferry.weights.tensor_store import Shape, TensorStore, check_link, check_listed, read_index

# The first release whose weights-only unpickler has no known memory corruption (CVE-2026-24747).
MIN_TORCH = (2, 10)
MAX_ENTRIES = 2_000_000


class Inert:
    """Stands in for a class whose code we neither have nor run; keeps what the pickle gave it."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _latin1(text: str, encoding: str = "latin1") -> bytes:
    """The one use numpy's pickles make of `_codecs.encode`; other codecs could run or inflate things."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"_codecs.encode with {encoding!r} is refused")
    return text.encode("latin1")


# What Megatron-LM keeps beside the tensors (megatron/core/safe_globals.py lists the same, plus legacy
# names): the arguments of the run and a few enums in them, and the state of random generators.
_INERT = (
    "megatron.core.enums.ModelType",
    "megatron.model.enums.ModelType",
    "megatron.legacy.model.enums.ModelType",
    "megatron.enums.ModelType",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.model.enums.PositionEmbeddingType",
    "io.BytesIO",
    "_io.BytesIO",
    "signal.Signals",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
)


def _allowed() -> list[Any]:
    reconstruct = np.array(0).__reduce__()[0]
    numpy_parts = [
        (np.ndarray, "numpy.ndarray"),
        (np.dtype, "numpy.dtype"),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (type(np.dtype(np.uint32)), "numpy.dtypes.UInt32DType"),
        (_latin1, "_codecs.encode"),
    ]
    plain = [(argparse.Namespace, "argparse.Namespace"), (types.SimpleNamespace, "types.SimpleNamespace")]
    return [*plain, *numpy_parts, *((Inert, name) for name in _INERT)]


def import_torch(path: Path) -> Any:
    """The torch module.

    Raises:
        MindferryError: it is not installed, or too old to read untrusted pickles.
    """
    try:
        import torch
    except ImportError:
        raise MindferryError(
            f"{path}: PyTorch is needed to read a pickled checkpoint",
            remedy="pip install 'mindferry[torch]', or save the model as safetensors",
            id="source.needs-torch",
        ) from None
    found = tuple(int(part) for part in re.findall(r"[0-9]+", torch.__version__)[:2])
    if found < MIN_TORCH:
        raise MindferryError(
            f"{path}: PyTorch {torch.__version__} is too old to read files from others safely",
            remedy="pip install 'torch>=2.10' (CVE-2026-24747)",
            id="source.old-torch",
        )
    return torch


def load_pickled(path: Path) -> Any:
    """The object in `path`; tensors are on the CPU and, for files of torch >= 1.6, mapped, not read.

    Raises:
        MindferryError: the file is damaged, or holds a class that is not allowed.
    """
    torch = import_torch(path)
    zipped = zipfile.is_zipfile(path)
    if zipped:
        _check_archive(path)
    try:
        with _safe_globals(torch):
            return torch.load(path, map_location="cpu", mmap=zipped, weights_only=True)
    except pickle.UnpicklingError as err:
        raise _refused(path, str(err)) from None
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, OSError) as err:
        first = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise damaged(path, f"cannot be read: {first[:300]}") from None


@contextmanager
def _safe_globals(torch: Any) -> Iterator[None]:
    with torch.serialization.safe_globals(_allowed()):
        yield


def _refused(path: Path, message: str) -> MindferryError:
    found = re.search(r"GLOBAL ([\w.]+)", message) or re.search(r"(?:class|instance) ([\w.]+)", message)
    if found:
        return MindferryError(
            f"{path}: the pickle holds {found.group(1)}, which is not a tensor or a plain container",
            cause="loading it would run code that came with the file",
            remedy="save the state dict alone, best as safetensors, in the environment it came from",
            id="source.unsafe-pickle",
            evidence=found.group(1),
        )
    return damaged(path, f"not a checkpoint that can be read safely: {message.strip().splitlines()[0][:300]}")


def _check_archive(path: Path) -> None:
    """torch.save stores its entries uncompressed; a compressed one could inflate without limit."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as err:
        raise damaged(path, f"not a readable archive: {err}") from None
    size = path.stat().st_size
    if len(entries) > MAX_ENTRIES:
        raise damaged(path, f"{len(entries)} entries (limit {MAX_ENTRIES})")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise damaged(path, f"entry {entry.filename[:80]!r} is compressed or larger than the file")


class TorchStore(TensorStore):
    """The tensors of one or several state dicts, as numpy arrays over the same memory."""

    def __init__(self, parts: list[tuple[Path, Mapping[str, Any]]]) -> None:
        import torch

        self.warnings = []
        self._tensors: dict[str, tuple[Path, Any]] = {}
        self._dtypes: dict[Any, np.dtype[Any]] = {
            torch.float64: np.dtype(np.float64),
            torch.float32: np.dtype(np.float32),
            torch.float16: np.dtype(np.float16),
            torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
            torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
            torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
            torch.int64: np.dtype(np.int64),
            torch.int32: np.dtype(np.int32),
            torch.int16: np.dtype(np.int16),
            torch.int8: np.dtype(np.int8),
            torch.uint8: np.dtype(np.uint8),
            torch.bool: np.dtype(np.bool_),
        }
        self._words = {1: torch.uint8, 2: torch.int16}
        for path, state in parts:
            for name, value in state.items():
                self._add(path, name, value)

    def _add(self, path: Path, name: object, value: Any) -> None:
        import torch

        if not isinstance(name, str) or not valid_name(name):
            raise damaged(path, f"tensor name {str(name)[:80]!r} is not printable text")
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise damaged(path, f"{name!r} is a {type(value).__name__}, expected a tensor")
        if value.dtype not in self._dtypes:
            raise damaged(path, f"{name!r} has the type {value.dtype}, which is not supported")
        if name in self._tensors:
            other, first = self._tensors[name]
            if first.dtype != value.dtype or not torch.equal(first, value):
                raise damaged(path, f"tensor {name!r} is also in {other.name}, with other contents")
        self._tensors[name] = (path, value)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        return tuple(self._tensors[name][1].shape)

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._dtypes[self._tensors[name][1].dtype]

    def read(self, name: str) -> np.ndarray:
        tensor, dtype = self._tensors[name][1].detach().contiguous(), self.dtype(name)
        if dtype.kind == "V" or dtype.name.startswith("float8"):  # numpy knows these only as words
            array = tensor.view(self._words[dtype.itemsize]).numpy().view(dtype)
        else:
            array = tensor.numpy()
        array.flags.writeable = False
        return array

    def location(self, name: str) -> Path:
        return self._tensors[name][0]


def state_dict(path: Path, tree: Any) -> Mapping[str, Any]:
    """`tree` if it is a table of tensors, or the one under "model" or "state_dict"."""
    for _ in range(3):
        if not isinstance(tree, Mapping):
            break
        inner = next(
            (tree[key] for key in ("model", "state_dict") if isinstance(tree.get(key), Mapping)), None
        )
        if inner is None:
            return tree
        tree = inner
    raise damaged(path, f"holds a {type(tree).__name__}, expected a table of tensors")


def open_bin(path: Path) -> TorchStore:
    """The weights of `pytorch_model.bin`."""
    return TorchStore([(path, state_dict(path, load_pickled(path)))])


def open_bin_index(index: Path) -> TorchStore:
    """The weights of all shards that `pytorch_model.bin.index.json` names, held against it both ways."""
    table = read_index(index)
    parts = []
    for name in sorted(set(table.values())):
        file = index.parent / name
        check_link(index.parent, file)
        parts.append((file, state_dict(file, load_pickled(file))))
    store = TorchStore(parts)
    check_listed(index, table, store.names(), store.warnings)
    return store
