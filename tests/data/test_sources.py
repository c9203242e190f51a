"""Every input format: the same documents give the same tokens, and damage is named with its place."""

from __future__ import annotations

import gzip
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data import ByteTokenizer, DataOptions, DataReport, build_dataset, open_megatron
from mindferry.data.megatron import MegatronWriter
from mindferry.errors import MindferryError, UsageError

from .test_mindrecord import rows_of, write

TEXTS = ["the first document\nwith two lines", "", "zweites: größer, 数据 🚢", " \n ", "third"]
EOD = 256
EXPECTED = [[*text.encode(), EOD] for text in TEXTS if text.strip()]


def build(corpus: Path | list[Path], out: Path, **kwargs: Any) -> DataReport:
    """Bytes as tokens, into a Megatron data set."""
    sizes: dict[str, Any] = {"seq_length": 4, "vocab_size": 257, "eos_token_id": EOD}
    options = DataOptions(**{"output": "megatron", **kwargs.pop("options", {})})
    corpus = corpus if isinstance(corpus, list) else [corpus]
    return build_dataset(corpus, ByteTokenizer(), out, options=options, **(sizes | kwargs))


def documents(out: Path, name: str = "train") -> list[list[int]]:
    return [ids.tolist() for ids in open_megatron(out / name).iter_documents()]


def jsonl(texts: list[Any], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: t}).encode() + b"\n" for i, t in enumerate(texts))


def zstd(raw: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as out:
        out.write(raw)
    return sink.getvalue().to_pybytes()


def table(path: Path, texts: list[Any], kind: str) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    data = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string())})
    if kind == "parquet":
        pyarrow.parquet.write_table(data, path, row_group_size=2)
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with new(str(path), data.schema) as writer:
            writer.write_table(data, max_chunksize=2)
    return path


def make(kind: str, tmp_path: Path) -> Path:
    """The documents TEXTS as a source of `kind`."""
    if kind == "text":
        return write(tmp_path / "c", {f"{i}.txt": text for i, text in enumerate(TEXTS)})
    if kind == "text.gz":
        return write(
            tmp_path / "c", {f"{i}.txt.gz": gzip.compress(text.encode()) for i, text in enumerate(TEXTS)}
        )
    if kind in ("jsonl", "jsonl.gz", "jsonl.zst"):
        raw = jsonl(TEXTS)
        raw = {"jsonl": raw, "jsonl.gz": gzip.compress(raw), "jsonl.zst": zstd(raw)}[kind]
        return write(tmp_path / "c", {f"x.{kind}": raw})
    if kind in ("parquet", "stream", "file"):
        return table(tmp_path / ("x.parquet" if kind == "parquet" else "x.arrow"), TEXTS, kind)
    import datasets

    data = datasets.Dataset.from_dict({"text": TEXTS})
    if kind == "saved splits":
        datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(str(tmp_path / "d"))
    else:
        data.save_to_disk(str(tmp_path / "d"), num_shards=2)
    return tmp_path / "d"


KINDS = [
    "text",
    "text.gz",
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "parquet",
    "stream",
    "file",
    "saved",
    "saved splits",
]


@pytest.mark.parametrize("kind", KINDS)
def test_formats_agree(tmp_path: Path, kind: str) -> None:
    report = build(make(kind, tmp_path), tmp_path / "o")
    assert documents(tmp_path / "o") == EXPECTED
    assert (report.documents, report.skipped_documents) == (3, 2)
    assert report.text_field == (None if kind.startswith("text") else "text")
    assert report.token_dtype == "uint16"
    assert sorted(os.listdir(tmp_path / "o")) == ["train.bin", "train.idx"] == sorted(report.files)


def test_field_is_guessed_and_said(tmp_path: Path) -> None:
    source = write(tmp_path, {"a.jsonl": jsonl(["ab", "cd"], "content")}) / "a.jsonl"
    report = build(source, tmp_path / "o")
    assert report.text_field == "content"
    assert any("'content'" in text for text in report.warnings)
    report = build(source, tmp_path / "p", options={"text_field": "content"})
    assert report.warnings == []
    with pytest.raises(
        UsageError, match=r"no field 'contents' \(found id, content\) - did you mean 'content'"
    ):
        build(source, tmp_path / "q", options={"text_field": "contents"})
    unclear = write(tmp_path, {"b.jsonl": b'{"x": "one", "y": "two"}\n'}) / "b.jsonl"
    with pytest.raises(UsageError, match=r"cannot tell which field holds the text \(found x, y\)"):
        build(unclear, tmp_path / "q")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', r"x\.jsonl: line 2, column 13: "),
        (b'{"text": "a"}\n\n\nnonsense\n', r"x\.jsonl: line 4, column 1: "),
        (b'{"text": "a"}\n[1]\n', r"x\.jsonl: line 2: found list, expected an object"),
        (b'{"text": "a"}\n{"other": 1}\n', r"x\.jsonl: line 2: no field 'text' \(found other\)"),
        (b'{"text": "a"}\n{"text": 5}\n', r"x\.jsonl: line 2: field 'text': found int, expected text"),
        (b'{"text": "a"}\n' + b"[" * 200_000 + b"\n", r"x\.jsonl: line 2"),
        (b'{"text": "a", "n": ' + b"9" * 10_000 + b"}\n", r"x\.jsonl: line 1"),
        (b"\n\n", "nothing but empty or blank documents"),
        (b"", "nothing but empty or blank documents"),
    ],
)
def test_broken_jsonl(tmp_path: Path, raw: bytes, message: str) -> None:
    source = write(tmp_path, {"x.jsonl": raw}) / "x.jsonl"
    with pytest.raises(MindferryError, match=message):
        build(source, tmp_path / "o")
    assert not (tmp_path / "o").exists()


def test_null_text_bom_and_surrogates(tmp_path: Path) -> None:
    raw = b'\xef\xbb\xbf{"text": null}\r\n{"text": "a\\ud800b"}\r\n{"text": "c\xff"}'
    report = build(write(tmp_path, {"x.jsonl": raw}) / "x.jsonl", tmp_path / "o")
    assert documents(tmp_path / "o") == [[*"a\ufffdb".encode(), EOD], [*"c\ufffd".encode(), EOD]]
    assert (report.skipped_documents, report.invalid_utf8_bytes) == (1, 2)


def test_one_giant_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindferry.data.records.MAX_LINE_BYTES", 1 << 20)
    raw = b'{"text": "a"}\n[' + b'{"text": "x"},' * 300_000
    with pytest.raises(UsageError, match=r"line 2: longer than 1048576 bytes"):
        build(write(tmp_path, {"x.jsonl": raw}) / "x.jsonl", tmp_path / "o")


@pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.txt.zst", "x.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "garbage", "empty"])
def test_damaged_compression(tmp_path: Path, name: str, damage: str) -> None:
    if damage == "flipped" and name.endswith("zst"):
        pytest.skip("pyarrow writes zstd without a checksum: nobody can tell")
    plain = jsonl([f"document number {i}, {i * i}" for i in range(2000)])
    good = gzip.compress(plain) if name.endswith("gz") else zstd(plain)
    middle = len(good) // 2
    raw = {
        "cut": good[:middle],
        "flipped": good[:middle] + bytes([good[middle] ^ 0xFF]) + good[middle + 1 :],
        "garbage": b"this is no compressed file" * 10,
        "empty": b"",
    }[damage]
    with pytest.raises(MindferryError, match=name.replace(".", r"\.")):
        build(write(tmp_path, {name: raw}) / name, tmp_path / "o")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_damaged_tables(tmp_path: Path, kind: str) -> None:
    path = table(tmp_path / ("x.parquet" if kind == "parquet" else "x.arrow"), TEXTS * 50, kind)
    good = path.read_bytes()
    for raw in (b"", b"garbage" * 20, good[: len(good) // 3]):
        path.write_bytes(raw)
        with pytest.raises(MindferryError, match=r"x\.(parquet|arrow): "):
            build(path, tmp_path / "o")
    with pytest.raises(UsageError, match="field 'id' holds no text"):
        build(table(path, TEXTS, kind), tmp_path / "o", options={"text_field": "id"})


def test_saved_dataset_names_no_files_elsewhere(tmp_path: Path) -> None:
    directory = make("saved", tmp_path)
    state = json.loads((directory / "state.json").read_text())
    state["_data_files"][0]["filename"] = "../outside.arrow"
    (directory / "state.json").write_text(json.dumps(state))
    with pytest.raises(MindferryError, match=r"data file '\.\./outside\.arrow' is not in"):
        build(directory, tmp_path / "o")


def test_nanogpt_bin(tmp_path: Path) -> None:
    """uint16 without index: documents end at the end-of-text token, which stays."""
    ids = [5, 6, EOD, 7, 8, 9, EOD, 10]
    source = tmp_path / "train.bin"
    np.asarray(ids, dtype=np.uint16).tofile(source)
    report = build(source, tmp_path / "o")
    assert documents(tmp_path / "o") == [[5, 6, EOD], [7, 8, 9, EOD], [10]]
    assert (report.tokens, report.tokenizer) == (8, "")


def test_nanogpt_bin_of_another_width(tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    np.asarray([1, 2, 3], dtype=np.uint16).tofile(source)
    with pytest.raises(MindferryError, match=r"6 bytes are no whole number of int32 ids"):
        build(source, tmp_path / "o", options={"raw_dtype": "int32"})
    np.asarray([1, 2, 70000, 3], dtype=np.int32).tofile(source)
    # Taken for uint16, the ids are [1, 0, 2, 0, 4464, 1, ...]: out of a vocabulary of 257.
    with pytest.raises(MindferryError, match=r"document 0: token 4464 at position 4, expected ids below 257"):
        build(source, tmp_path / "o")
    source.write_bytes(b"")
    with pytest.raises(UsageError, match="empty"):
        build(source, tmp_path / "o")


def test_megatron_to_megatron(tmp_path: Path) -> None:
    writer = MegatronWriter(tmp_path, "in", np.int32)
    for ids in EXPECTED:
        writer.add(np.asarray(ids))
        writer.end_document()
    writer.finish(tmp_path / "in")
    for name in ("in", "in.bin", "in.idx"):
        build(tmp_path / name, tmp_path / f"o-{name}")
        assert documents(tmp_path / f"o-{name}") == EXPECTED
    assert open_megatron(tmp_path / "o-in/train").dtype == np.uint16
    with pytest.raises(
        MindferryError, match=r"in\.bin: document 0: token 116 at position 0, expected ids below 100"
    ):
        build(tmp_path / "in", tmp_path / "p", vocab_size=100, eos_token_id=0)


@pytest.mark.parametrize("ids", [[5, 100, 7], [5, -1, 7]])
def test_ids_outside_the_vocabulary(tmp_path: Path, ids: list[int]) -> None:
    writer = MegatronWriter(tmp_path, "in", np.int32)
    for document in ([1, 2], ids):
        writer.add(np.asarray(document))
        writer.end_document()
    writer.finish(tmp_path / "in")
    with pytest.raises(
        MindferryError, match=rf"document 1: token {ids[1]} at position 1, expected ids below 100"
    ):
        build(tmp_path / "in", tmp_path / "o", vocab_size=100, eos_token_id=0)


def test_a_big_vocabulary_is_never_narrowed(tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    ids = [0, 65535, 65536, 70000]
    np.asarray(ids, dtype=np.int32).tofile(source)
    sizes = {"vocab_size": 70001, "eos_token_id": None, "seq_length": 3}
    report = build(source, tmp_path / "o", options={"raw_dtype": "int32"}, **sizes)
    assert report.token_dtype == "int32"
    assert documents(tmp_path / "o") == [ids]
    with pytest.raises(MindferryError, match="token 70000 at position 3, expected ids below 70000"):
        build(source, tmp_path / "p", options={"raw_dtype": "int32"}, **(sizes | {"vocab_size": 70000}))


def legacy_mindrecord(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), shard_num=1)
    writer.add_schema({name: {"type": "int32", "shape": [-1]} for name in rows[0]}, "x")
    writer.write_raw_data([{name: np.asarray(ids, np.int32) for name, ids in row.items()} for row in rows])
    writer.commit()
    return path


def test_legacy_mindrecord_keeps_its_rows(tmp_path: Path) -> None:
    """Rows of seq_length + 1 (the model shifts) become rows of seq_length with labels (the data shifts)."""
    rows = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    source = legacy_mindrecord(
        tmp_path / "old.mindrecord", [{"input_ids": row, "attention_mask": [1] * 5} for row in rows]
    )
    report = build(source, tmp_path / "o", options={"output": "mindrecord"})
    made = rows_of(tmp_path / "o/train.mindrecord")
    assert [row["input_ids"].tolist() for row in made] == [[1, 2, 3, 4], [6, 7, 8, 9]]
    assert [row["labels"].tolist() for row in made] == [[2, 3, 4, 5], [7, 8, 9, 10]]
    assert (report.packing, report.sequences, report.padding_tokens) == ("pad", 2, 0)


def test_mindrecord_with_labels(tmp_path: Path) -> None:
    once = legacy_mindrecord(tmp_path / "a.mindrecord", [{"input_ids": [1, 2, 3, 4], "labels": [2, 3, 4, 5]}])
    build(once, tmp_path / "o")
    assert documents(tmp_path / "o") == [[1, 2, 3, 4, 5]]
    twice = legacy_mindrecord(
        tmp_path / "b.mindrecord", [{"input_ids": [1, 2, 3, 4], "labels": [3, 4, 5, 6]}]
    )
    with pytest.raises(
        MindferryError, match="row 0: labels are neither input_ids nor input_ids moved on by one"
    ):
        build(twice, tmp_path / "p")


def test_padding_starts_a_row_at_every_document(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", {"1.txt": "abcdef", "2.txt": "x"})
    report = build(corpus, tmp_path / "o", options={"output": "mindrecord", "packing": "pad"})
    rows = rows_of(tmp_path / "o/train.mindrecord")
    a, x, e = ord("a"), ord("x"), EOD
    assert [row["input_ids"].tolist() for row in rows] == [
        [a, a + 1, a + 2, a + 3],
        [a + 4, a + 5, e, e],
        [x, e, e, e],
    ]
    assert [row["labels"].tolist() for row in rows] == [
        [a + 1, a + 2, a + 3, a + 4],
        [a + 5, e, e, e],
        [e, e, e, e],
    ]
    assert [row["loss_mask"].tolist() for row in rows] == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert (report.sequences, report.padding_tokens, report.leftover_tokens) == (3, 5, 0)
    # Every adjacent pair inside a document is trained once.
    assert sum(int(row["loss_mask"].sum()) for row in rows) == 6 + 1


def test_split_by_document(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(200)]
    source = write(tmp_path, {"x.jsonl": jsonl(texts)}) / "x.jsonl"
    report = build(source, tmp_path / "o", options={"valid_fraction": 0.1})
    train, valid = documents(tmp_path / "o"), documents(tmp_path / "o", "valid")
    all_documents = [[*text.encode(), EOD] for text in texts]
    assert sorted(train + valid) == sorted(all_documents)
    assert 8 <= len(valid) <= 35
    # Order is kept within each, and another seed picks others.
    assert train == [ids for ids in all_documents if ids in train]
    build(source, tmp_path / "p", options={"valid_fraction": 0.1, "split_seed": 1})
    assert documents(tmp_path / "p", "valid") != valid
    assert report.splits["valid"].documents == len(valid)
    assert report.documents == 200
    one = write(tmp_path / "one", {"a.txt": "only one document"})
    with pytest.raises(UsageError, match="split by whole documents"):
        build(one, tmp_path / "q", options={"valid_fraction": 0.5})


def test_options_that_cannot_work(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c", {"a.txt": "abcdefgh"})
    for options, message in (
        ({"packing": "pad"}, "Megatron files hold whole documents"),
        ({"valid_fraction": 1.0}, "expected 0 <= fraction < 1"),
        ({"pad_token_id": 300}, "pad_token_id: found 300"),
    ):
        with pytest.raises(UsageError, match=message):
            build(corpus, tmp_path / "o", options=options)


def fuzz_jsonl(directory: Path, mutations: int, seconds: float) -> int:
    """Random damage to a JSON-lines file: it is read, or refused with its name."""
    rng = np.random.default_rng(7)
    good = jsonl(["a line", "über 数据", None, 'quotes " and \\ and \n'])
    path = directory / "x.jsonl"
    until = time.monotonic() + seconds
    from mindferry.data.records import jsonl_field, jsonl_records

    for number in range(mutations):
        raw = bytearray(good)
        for _ in range(rng.integers(1, 6)):
            at = int(rng.integers(len(raw)))
            if rng.integers(2):
                raw[at] = int(rng.integers(256))
            else:
                raw[at : at + int(rng.integers(4))] = rng.bytes(int(rng.integers(4)))
        path.write_bytes(bytes(raw))
        try:
            field = jsonl_field(path, None)
            for record in jsonl_records(path, field or "text"):
                record.text.encode()
        except MindferryError as err:
            assert "x.jsonl" in err.message  # noqa: PT017
        if time.monotonic() > until:
            return number + 1
    return mutations


def test_fuzz_jsonl(tmp_path: Path) -> None:
    assert fuzz_jsonl(tmp_path, 10_000, seconds=4) > 500


@pytest.mark.long
def test_fuzz_jsonl_long(tmp_path: Path) -> None:
    assert fuzz_jsonl(tmp_path, 1_000_000, seconds=120) >= 10_000
