"""Rows of a MindRecord read with numpy: as mindspore reads them, and damaged in every way without a crash."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from mindferry.data import DataOptions, build_dataset, find_sources, inspect_mindrecord
from mindferry.data.mindrecord import write_mindrecord
from mindferry.data.mindrecord_rows import integer_rows
from mindferry.data.token_files import mindrecord_rows
from mindferry.errors import MindferryError

from .test_mindrecord import two_rows


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_rows_are_those_that_mindspore_reads(tmp_path: Path, columns: int) -> None:
    """Integers of every width and sign, lengths from 1 to 40, int32 and int64, alone and beside other columns."""
    from mindspore.mindrecord import FileReader, FileWriter

    rng = np.random.default_rng(columns)
    dtypes = {"a": np.int32, "b": np.int64, "c": np.float32}
    names = list(dtypes)[:columns]
    writer = FileWriter(str(tmp_path / "r.mindrecord"), shard_num=1)
    writer.add_schema({n: {"type": np.dtype(dtypes[n]).name, "shape": [-1]} for n in names}, "x")
    rows = []
    for _ in range(200):
        row = {}
        for name in names:
            limits = np.iinfo(dtypes[name]) if name != "c" else np.iinfo(np.int8)
            bits = rng.integers(0, limits.bits, rng.integers(1, 41))
            values = rng.integers(0, 2**63, len(bits)) % (np.int64(1) << bits.astype(np.int64))
            row[name] = (values * rng.choice([1, -1], len(bits))).astype(dtypes[name])
        for name in names[:2]:
            row[name][0] = [np.iinfo(dtypes[name]).min, np.iinfo(dtypes[name]).max, 127, 128, -128, -129][
                len(rows) % 6
            ]
        rows.append(row)
    writer.write_raw_data(rows)
    writer.commit()
    wanted = names[:2]
    reader = FileReader(str(tmp_path / "r.mindrecord"))
    theirs = list(reader.get_next())
    reader.close()
    ours = list(integer_rows(tmp_path / "r.mindrecord", wanted))
    assert len(ours) == len(theirs) == 200
    for one, other, row in zip(ours, theirs, rows, strict=True):
        for name in wanted:
            np.testing.assert_array_equal(one[name], other[name])
            np.testing.assert_array_equal(one[name], row[name])


def test_many_pages_and_shards(tmp_path: Path) -> None:
    """Rows over several pages of 32 KiB, in two files; each is a source of its own."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(tmp_path / "s.mindrecord"), shard_num=2)
    writer.set_page_size(1 << 15)
    writer.add_schema({"input_ids": {"type": "int32", "shape": [1000]}}, "x")
    rows = [np.arange(i, i + 1000, dtype=np.int32) for i in range(100)]
    writer.write_raw_data([{"input_ids": row} for row in rows])
    writer.commit()
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".db")
    assert [path.name for path in files] == ["s.mindrecord0", "s.mindrecord1"]
    assert [source.kind for source in find_sources(files)] == ["mindrecord", "mindrecord"]
    found = [row["input_ids"] for path in files for row in integer_rows(path, ["input_ids"])]
    assert sorted(int(row[0]) for row in found) == list(range(100))
    for row in found:
        np.testing.assert_array_equal(row, rows[row[0]])
    report = build_dataset(
        files,
        {},
        tmp_path / "o",
        seq_length=999,
        vocab_size=2000,
        eos_token_id=None,
        options=DataOptions(output="megatron"),
    )
    assert report.tokens == 100_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "UPDATE INDEXES SET PAGE_OFFSET_BLOB_END = 1 << 40",
            "row 0: its .db places it at 0 to 1099511627776",
        ),
        ("UPDATE INDEXES SET PAGE_OFFSET_BLOB = -8", "row 0: its .db places it at -8"),
        ("UPDATE INDEXES SET PAGE_ID_BLOB = 7", "of page 7"),
        ("UPDATE INDEXES SET PAGE_ID_BLOB = 'x'", "of page x"),
        ("UPDATE INDEXES SET PAGE_OFFSET_BLOB = PAGE_OFFSET_BLOB + 1", "no block of"),
    ],
)
def test_an_index_that_points_elsewhere(tmp_path: Path, change: str, message: str) -> None:
    import sqlite3

    path = tmp_path / "train.mindrecord"
    write_mindrecord(path, two_rows(), 5)
    with sqlite3.connect(f"{path}.db") as connection:
        connection.execute(change)
    connection.close()
    with pytest.raises(MindferryError, match=message):
        list(integer_rows(path, ["input_ids"]))


def fuzz(tmp_path: Path, mutations: int, seconds: float) -> int:
    """Random damage to the header, the rows, the size and the index: read, or refused with the file's name."""
    path = tmp_path / "train.mindrecord"
    write_mindrecord(path, two_rows(), 5)
    index = tmp_path / "train.mindrecord.db"
    head, good_index, size = path.read_bytes()[:1024], index.read_bytes(), path.stat().st_size
    begin = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])["header_size"]
    with open(path, "rb") as handle:
        handle.seek(begin)
        block = handle.read(256).rstrip(b"\0")
    assert len(block) > 100
    used = 8 + int.from_bytes(head[:8], "little")
    rng = np.random.default_rng(3)
    until = time.monotonic() + seconds
    for number in range(mutations):
        raw = bytearray(head)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(used))
            raw[at : at + int(rng.integers(1, 9))] = (
                rng.bytes(int(rng.integers(1, 9))) if rng.integers(2) else b"9"
            )
        rows = bytearray(block)
        for _ in range(rng.integers(1, 4)):
            rows[int(rng.integers(len(rows)))] = int(rng.integers(256))
        with open(path, "r+b") as handle:
            handle.write(bytes(raw[:1024]).ljust(1024, b"\0") if number % 3 else head)
            handle.seek(begin)
            handle.write(rows)
            handle.truncate(size if number % 4 else int(rng.integers(size + 100)))
        damaged = bytearray(good_index)
        if number % 2:
            at = int(rng.integers(len(damaged)))
            damaged[at : at + 4] = rng.bytes(4)
        index.write_bytes(bytes(damaged[: None if number % 5 else int(rng.integers(len(damaged)))]))
        try:
            info = inspect_mindrecord(path)
            assert info.rows >= 0
            for part in mindrecord_rows(path):
                assert part.ids.dtype == np.int64
        except MindferryError as err:
            assert "train.mindrecord" in err.message  # noqa: PT017
        with open(path, "r+b") as handle:
            handle.truncate(size)
        if time.monotonic() > until:
            return number + 1
    return mutations


def test_fuzz(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 10_000, seconds=4) > 200


@pytest.mark.long
def test_fuzz_long(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 20_000, seconds=900) >= 10_000
