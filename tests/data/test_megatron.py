"""Megatron .bin/.idx: against mindformers' own reader and writer, damaged in every way, and large."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindferry.data.megatron import DTYPES, HEADER_BYTES, MAGIC, MegatronWriter, open_megatron, paths
from mindferry.errors import MindferryError, UsageError

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8, 9]]


def write(directory: Path, documents: list[Any], dtype: Any = np.uint16, name: str = "d") -> Path:
    writer = MegatronWriter(directory, name, dtype)
    for ids in documents:
        writer.add(np.asarray(ids, dtype=np.int64))
        writer.end_document()
    writer.finish(directory / name)
    return directory / name


def index_bytes(lengths: list[int], pointers: list[int], documents: list[int], code: int = 8) -> bytes:
    """An .idx by hand, as the layout says."""
    return (
        MAGIC
        + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
        + np.asarray(lengths, "<i4").tobytes()
        + np.asarray(pointers, "<i8").tobytes()
        + np.asarray(documents, "<i8").tobytes()
    )


def pair(tmp_path: Path, index: bytes, data: bytes) -> Path:
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(data)
    return tmp_path / "x"


def test_bytes_by_hand(tmp_path: Path) -> None:
    prefix = write(tmp_path, DOCUMENTS)
    assert (tmp_path / "d.bin").read_bytes() == np.arange(1, 10, dtype="<u2").tobytes()
    assert (tmp_path / "d.idx").read_bytes() == index_bytes([3, 1, 0, 5], [0, 6, 8, 8], [0, 1, 2, 3, 4])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]
    assert prefix == tmp_path / "d"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_mindformers_reads_what_we_write(tmp_path: Path, dtype: Any) -> None:
    from mindformers.dataset.blended_datasets.indexed_dataset import IndexedDataset

    prefix = write(tmp_path, DOCUMENTS, dtype)
    theirs = IndexedDataset(str(prefix), mmap=True)
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert theirs[0].dtype == dtype


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_we_read_what_mindformers_writes(tmp_path: Path, code: int) -> None:
    from mindformers.dataset.blended_datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.dtype_from_code(code)
    builder = IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=dtype)
    for ids in DOCUMENTS[:2]:
        builder.add_item(np.asarray(ids, dtype=dtype))
    builder.end_document()  # two sequences in one document
    builder.add_item(np.asarray(DOCUMENTS[3], dtype=dtype))
    builder.end_document()
    builder.finalize(str(tmp_path / "d.idx"))
    data = open_megatron(tmp_path / "d")
    assert data.dtype == np.dtype(dtype)
    assert data.num_documents == 2
    assert [ids.tolist() for ids in data.iter_documents()] == [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert data.stream().tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert data.tokens == 9


def test_the_dtypes_are_megatrons() -> None:
    from mindformers.dataset.blended_datasets.indexed_dataset import DType

    assert {code: np.dtype(DType.dtype_from_code(code)) for code in range(1, 9)} == DTYPES


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(st.lists(st.integers(0, 65535), max_size=20), max_size=20), cut=st.integers(0, 100))
def test_round_trip_with_a_crash_in_between(tmp_path: Path, documents: list[list[int]], cut: int) -> None:
    """Whatever was written after the last sync is forgotten, and the files come out as if nothing had been."""
    cut = min(cut, len(documents))
    writer = MegatronWriter(tmp_path, "d", np.uint16)
    state = writer.sync()
    for i, ids in enumerate(documents):
        if i == cut:
            state = writer.sync()
        writer.add(np.asarray(ids))
        writer.end_document()
    writer.close()
    resumed = MegatronWriter(tmp_path, "d", np.uint16, state)
    for ids in documents[resumed.state.documents :]:
        resumed.add(np.asarray(ids[:1]))
        resumed.add(np.asarray(ids[1:]))
        resumed.end_document()
    resumed.finish(tmp_path / "d")
    data = open_megatron(tmp_path / "d")
    assert [ids.tolist() for ids in data.iter_documents()] == documents
    assert data.contiguous


def test_document_longer_than_a_sequence_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindferry.data.megatron.MAX_SEQUENCE", 4)
    prefix = write(tmp_path, [list(range(10)), [1]])
    data = open_megatron(prefix)
    assert data.lengths.tolist() == [4, 4, 2, 1]
    assert data.documents.tolist() == [0, 3, 4]
    assert [ids.tolist() for ids in data.iter_documents()] == [list(range(10)), [1]]


def test_wide_ids_keep_their_width(tmp_path: Path) -> None:
    ids = [0, 65535, 65536, 70000]
    data = open_megatron(write(tmp_path, [ids], np.int32))
    assert data.dtype == np.int32
    assert data.stream().tolist() == ids


BIN = np.arange(1, 10, dtype="<u2").tobytes()


@pytest.mark.parametrize(
    ("index", "data", "message"),
    [
        (index_bytes([3, 1, 5], [0, 6, -8], [0, 1, 2, 3]), BIN, r"sequence 2 \(document 2\): offset -8"),
        (
            index_bytes([3, 1, 6], [0, 6, 8], [0, 1, 2, 3]),
            BIN,
            r"sequence 2 .* do not lie inside the 18 bytes",
        ),
        (index_bytes([3, 1, 5], [0, 6, 2**63 - 1], [0, 1, 2, 3]), BIN, r"sequence 2 .* do not lie inside"),
        (
            index_bytes([3, -1, 5], [0, 6, 8], [0, 1, 2, 3]),
            BIN,
            r"byte 38: sequence 1 \(document 1\): length -1",
        ),
        (index_bytes([3, 1, 5], [0, 6, 8], [0, 2, 1, 3]), BIN, "document bound 2 is smaller"),
        (index_bytes([3, 1, 5], [0, 6, 8], [1, 2, 3]), BIN, "run from 1 to 3, not 0 to 3"),
        (index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2]), BIN, "run from 0 to 2, not 0 to 3"),
        (index_bytes([3, 1, 5], [0, 6, 8], []), BIN, "document bounds: found 0"),
        (index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3]), BIN[:-1], "do not lie inside"),
        (index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3]), BIN + b"\0\0", "found 20 bytes, expected 18"),
        (index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3], code=9), BIN, "dtype code: found 9"),
        (index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3], code=0), BIN, "dtype code: found 0"),
        (b"", BIN, "found 0 bytes, expected a header of 34"),
        (b"MMIDIDX\0\1" + index_bytes([], [], [0])[9:], BIN, "no Megatron index"),
        (MAGIC + struct.pack("<QBQQ", 0, 8, 0, 1) + bytes(8), b"", "version: found 0, expected 1"),
    ],
)
def test_damaged_index(tmp_path: Path, index: bytes, data: bytes, message: str) -> None:
    with pytest.raises(MindferryError, match=message):
        open_megatron(pair(tmp_path, index, data))


@pytest.mark.parametrize("count", [1, 2**31, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("which", [18, 26])
def test_counts_from_hell_allocate_nothing(tmp_path: Path, count: int, which: int) -> None:
    raw = bytearray(index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3]))
    struct.pack_into("<Q", raw, which, count)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MindferryError, match=r"byte 18: .* need \d+ bytes, the file has"):
        open_megatron(pair(tmp_path, bytes(raw), BIN))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_multimodal_and_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="multimodal"):
        open_megatron(pair(tmp_path, index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3]) + bytes(3), BIN))
    (tmp_path / "x.bin").unlink()
    with pytest.raises(UsageError, match=r"x\.bin: no such file"):
        open_megatron(tmp_path / "x.idx")


def test_gaps_are_readable_but_no_stream(tmp_path: Path) -> None:
    data = open_megatron(pair(tmp_path, index_bytes([2, 2], [4, 0], [0, 1, 2]), BIN))
    assert [ids.tolist() for ids in data.iter_documents()] == [[3, 4], [1, 2]]
    with pytest.raises(MindferryError, match="do not lie one after the other"):
        data.stream()


@pytest.mark.parametrize("value", [1.5, float("nan"), float("inf"), 1e300])
def test_floats_must_be_whole(tmp_path: Path, value: float) -> None:
    raw = np.asarray([1.0, value], "<f8").tobytes()
    data = open_megatron(pair(tmp_path, index_bytes([2], [0], [0, 1], code=6), raw))
    with pytest.raises(MindferryError, match="at position 1, expected a whole number"):
        list(data.iter_documents())


def read_all(prefix: Path) -> None:
    """What any user of the reader does; may only fail with a MindferryError."""
    try:
        data = open_megatron(prefix)
        for ids in data.iter_documents():
            assert ids.dtype == np.int64
    except MindferryError as err:
        assert ".idx" in err.message or ".bin" in err.message  # noqa: PT017


def test_truncated_everywhere(tmp_path: Path) -> None:
    good = index_bytes([3, 1, 5], [0, 6, 8], [0, 1, 2, 3])
    for end in range(len(good)):
        with pytest.raises(MindferryError):
            open_megatron(pair(tmp_path, good[:end], BIN))
    for end in range(len(BIN)):
        with pytest.raises(MindferryError):
            open_megatron(pair(tmp_path, good, BIN[:end]))


def fuzz(tmp_path: Path, mutations: int, seconds: float) -> int:
    """Random damage to index and data; returns how many were tried."""
    rng = np.random.default_rng(20240607)
    good = index_bytes([3, 1, 0, 5], [0, 6, 8, 8], [0, 1, 2, 4])
    until = time.monotonic() + seconds
    edges = [0, 1, 2**15, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
    for number in range(mutations):
        raw = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            kind = rng.integers(4)
            at = int(rng.integers(len(raw)))
            if kind == 0:
                raw[at] ^= 1 << int(rng.integers(8))
            elif kind == 1:
                del raw[at : at + int(rng.integers(1, 9))]
            elif kind == 2:
                raw[at:at] = rng.bytes(int(rng.integers(1, 9)))
            elif at + 8 <= len(raw):
                struct.pack_into("<Q", raw, at, edges[int(rng.integers(len(edges)))])
            if not raw:
                break
        read_all(pair(tmp_path, bytes(raw), BIN[: int(rng.integers(len(BIN) + 1))] if number % 3 else BIN))
        if time.monotonic() > until:
            return number + 1
    return mutations


def test_fuzz(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 10_000, seconds=8) > 500


@pytest.mark.long
def test_fuzz_long(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 1_000_000, seconds=120) >= 10_000


_MANY = """
import resource, sys
import numpy as np
from pathlib import Path
from mindferry.data.megatron import MegatronWriter, WriterState, open_megatron
directory, n = Path(sys.argv[1]), int(sys.argv[2])
# The working files of a writer that has seen n documents of one token.
np.ones(n, "<i4").tofile(directory / "m.lengths")
np.arange(1, n + 1, dtype="<i8").tofile(directory / "m.documents")
np.ones(n, "<u2").tofile(directory / "m.tokens")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
writer = MegatronWriter(directory, "m", np.uint16, WriterState(tokens=n, sequences=n, documents=n))
writer.finish(directory / "m")
data = open_megatron(directory / "m")
assert data.num_documents == n and data.tokens == n, data
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("documents", [5_000_000, pytest.param(50_000_000, marks=pytest.mark.long)])
def test_index_of_many_documents_in_little_memory(tmp_path: Path, documents: int) -> None:
    """Index of 50 million documents: 1.0 GB on the disk, and the reader maps it without copying."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(tmp_path), str(documents)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown_kib = int(done.stdout)
    # File pages mapped by the reader count as resident; they are the size of the index at most.
    assert grown_kib * 1024 < documents * 22 + (200 << 20)
    assert grown_kib < 1.5 * (1 << 20)
    assert paths(tmp_path / "m")[1].stat().st_size == HEADER_BYTES + 20 * documents + 8
