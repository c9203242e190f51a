"""Neighbours of the faults that people reported: other widths, encodings, formats, tables, paths, edges of sizes."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindferry.data import open_megatron, sample_tokens
from mindferry.data.megatron import DTYPES, MegatronWriter
from mindferry.data.packing import plan, rows
from mindferry.errors import MindferryError, UsageError

from .test_megatron import index_bytes
from .test_mindrecord import write
from .test_sources import EOD, build, documents, jsonl, zstd

IDS = [1, 2, 3, 200, 7, 7, 9, 12]


@pytest.mark.parametrize("dtype", ["<i4", "<u4"])
@pytest.mark.parametrize("count", [3, 200])
def test_four_byte_ids_taken_for_uint16(tmp_path: Path, dtype: str, count: int) -> None:
    """Every second id would be 0, and all of them inside the vocabulary."""
    source = tmp_path / "train.bin"
    ids = np.resize(np.asarray(IDS), count)
    ids.astype(dtype).tofile(source)
    with pytest.raises(MindferryError, match="every second uint16 is 0: ids of four bytes"):
        build(source, tmp_path / "o")
    with pytest.raises(MindferryError, match="ids of four bytes"):
        sample_tokens(source)
    name = np.dtype(dtype).name
    build(source, tmp_path / "p", options={"raw_dtype": name}, seq_length=2)
    assert documents(tmp_path / "p") == [ids.tolist()]
    build(source, tmp_path / "q", options={"raw_dtype": "uint16"}, seq_length=2)  # who says so gets it
    assert documents(tmp_path / "q") == [np.stack([ids, 0 * ids], 1).reshape(-1).tolist()]


def test_four_byte_ids_of_a_large_vocabulary(tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    np.random.default_rng(0).integers(0, 128_256, 1000).astype("<u4").tofile(source)
    with pytest.raises(UsageError, match="cannot hold a vocabulary of 128256"):
        build(source, tmp_path / "o", vocab_size=128_256)
    with pytest.raises(MindferryError, match="every second uint16 is 0, 1 or 2"):
        build(source, tmp_path / "o", vocab_size=65_536)
    report = build(source, tmp_path / "o", vocab_size=128_256, options={"raw_dtype": "uint32"})
    assert (report.token_dtype, report.tokens) == ("int32", 1000)


def test_two_byte_ids_taken_for_four(tmp_path: Path) -> None:
    source = tmp_path / "train.bin"
    np.asarray(IDS, "<u2").tofile(source)
    with pytest.raises(MindferryError, match="token 131073 at position 0, expected ids below 257") as caught:
        build(source, tmp_path / "o", options={"raw_dtype": "int32"})
    assert "wrong width" in caught.value.cause


@pytest.mark.parametrize(
    ("vocab", "largest", "stored"), [(65_536, 65_535, "uint16"), (65_537, 65_536, "int32")]
)
@pytest.mark.parametrize("output", ["megatron", "mindrecord"])
def test_the_edge_of_uint16(tmp_path: Path, vocab: int, largest: int, stored: str, output: str) -> None:
    """The largest id of either vocabulary survives; one more is refused."""
    ids = [0, largest, 1, largest, 2]
    for name, last in (("in", []), ("more", [vocab])):
        writer = MegatronWriter(tmp_path, name, np.int32)
        writer.add(np.asarray(ids + last))
        writer.end_document()
        writer.finish(tmp_path / name)
    sizes: dict[str, Any] = {"vocab_size": vocab, "eos_token_id": None, "options": {"output": output}}
    report = build(tmp_path / "in", tmp_path / "o", **sizes)
    assert report.token_dtype == stored
    if output == "megatron":
        assert open_megatron(tmp_path / "o/train").dtype == np.dtype(stored)
        assert documents(tmp_path / "o") == [ids]
    else:
        assert sample_tokens(tmp_path / "o/train.mindrecord").tolist() == ids
    with pytest.raises(
        MindferryError, match=f"document 0: token {vocab} at position 5, expected ids below {vocab}"
    ):
        build(tmp_path / "more", tmp_path / "p", **sizes)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_code_at_its_limits(tmp_path: Path, code: int) -> None:
    """The largest id a code holds is read as it is; negative ones and those above the vocabulary are named."""
    dtype = DTYPES[code]
    top = 1 << 24 if dtype.kind == "f" else min(np.iinfo(dtype).max, (1 << 31) - 1)
    for values, vocab, message in (
        ([0, 1, top], top + 1, None),
        ([0, 1, top], top, f"token {top} at position 2"),
        ([5, -1, 0], 100, "token -1 at position 1"),
    ):
        if min(values) < 0 and dtype.kind == "u":
            continue
        raw = np.asarray(values, dtype).tobytes()
        (tmp_path / "x.bin").write_bytes(raw)
        (tmp_path / "x.idx").write_bytes(index_bytes([3], [0], [0, 1], code=code))
        sizes = {"vocab_size": vocab, "eos_token_id": None, "seq_length": 2}
        if message is None:
            build(tmp_path / "x", tmp_path / f"o{code}", **sizes)
            assert documents(tmp_path / f"o{code}") == [values]
        else:
            with pytest.raises(MindferryError, match=message):
                build(tmp_path / "x", tmp_path / "p", **sizes)


@pytest.mark.parametrize("tokens", [b"", b"\x01\x00"])
def test_megatron_files_without_documents(tmp_path: Path, tokens: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(tokens)
    (tmp_path / "x.idx").write_bytes(
        index_bytes([], [], [0]) if not tokens else index_bytes([1], [0], [0, 1])
    )
    with pytest.raises(
        UsageError, match="nothing but empty" if not tokens else "1 tokens, expected at least 5"
    ):
        build(tmp_path / "x", tmp_path / "o")


def test_an_index_without_its_data(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(index_bytes([3], [0], [0, 1]))
    for name in ("x", "x.idx", "x.bin"):
        with pytest.raises(UsageError, match=r"x(\.bin|): no such file"):
            build(tmp_path / name, tmp_path / "o")
    write(tmp_path, {"y.mindrecord": bytes(100), "z.bin": b"1", "z.idx.gz": b""})
    with pytest.raises(
        UsageError, match=r"y\.mindrecord\.db: no such file; a MindRecord is a file and its \.db"
    ):
        build(tmp_path / "y.mindrecord", tmp_path / "o")


def zipped(raw: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", raw)
    return out.getvalue()


TEXT = b"a text that is long enough to be compressed\n" * 20
NO_TEXT = {
    "a gzip without its ending": (gzip.compress(TEXT), "is gzip"),
    "a zstd without its ending": (zstd(TEXT), "is zstd"),
    "xz": (lzma.compress(TEXT), "is xz"),
    "bzip2": (bz2.compress(TEXT), "is bzip2"),
    "zip": (zipped(TEXT), "is a zip archive"),
    "pdf": (b"%PDF-1.4\n" + TEXT, "is PDF"),
    "index": (index_bytes([3], [0], [0, 1]), "is a Megatron index"),
    "utf-16": (TEXT.decode().encode("utf-16"), "is UTF-16"),
    "utf-16 big endian": (b"\xfe\xff" + TEXT.decode().encode("utf-16-be"), "is UTF-16"),
    "utf-16 without mark": (TEXT.decode().encode("utf-16-le"), "is UTF-16"),
    "utf-32": (TEXT.decode().encode("utf-32"), "is UTF-16"),
    "zeros": (bytes(5000), "100% of its first 5000 bytes are zero"),
}


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("kind", list(NO_TEXT))
def test_what_is_no_text_is_not_trained_on(tmp_path: Path, kind: str, suffix: str) -> None:
    raw, message = NO_TEXT[kind]
    source = write(tmp_path, {f"x{suffix}": raw}) / f"x{suffix}"
    with pytest.raises(UsageError, match=message) as caught:
        build(source, tmp_path / "o")
    assert str(source) in caught.value.message
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["train.bin.gz", "x.mindrecord.gz", "x.parquet.zst", "x.arrow.gz"])
def test_ids_and_tables_are_not_read_compressed(tmp_path: Path, name: str) -> None:
    source = write(tmp_path, {name: gzip.compress(bytes(1000))}) / name
    with pytest.raises(UsageError, match="decompress it first"):
        build(source, tmp_path / "o")


def test_another_encoding_is_counted_and_said(tmp_path: Path) -> None:
    text = "天地玄黄，宇宙洪荒。" * 20
    report = build(write(tmp_path, {"x.txt": text.encode("gbk")}) / "x.txt", tmp_path / "o")
    assert report.invalid_utf8_bytes > 200
    assert any("Another encoding? iconv" in warning for warning in report.warnings)
    few = write(tmp_path, {"y.txt": b"caf\xe9 " + b"and so on " * 100}) / "y.txt"
    report = build(few, tmp_path / "p")
    assert report.invalid_utf8_bytes == 1
    assert not any("iconv" in warning for warning in report.warnings)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_stay_and_a_mark_goes(tmp_path: Path, end: str) -> None:
    text = f"one{end}two{end}{end}three"
    build(write(tmp_path, {"x.txt": b"\xef\xbb\xbf" + text.encode()}) / "x.txt", tmp_path / "o")
    assert documents(tmp_path / "o") == [[*text.encode(), EOD]]
    # A mark inside is a character of the text.
    build(write(tmp_path, {"y.txt": ("a\ufeffb" * 3).encode()}) / "y.txt", tmp_path / "p")
    assert documents(tmp_path / "p") == [[*("a\ufeffb" * 3).encode(), EOD]]


@pytest.mark.parametrize("blank", ["\u3000\u3000", "\u00a0\n", "\t\r\n \f\v", "\u2028\u2029", "\ufeff"])
def test_other_blanks_are_blank(tmp_path: Path, blank: str) -> None:
    corpus = write(tmp_path / "c", {"1.txt": blank, "2.txt": "some text", "3.txt": blank})
    report = build(corpus, tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"some text", EOD]]
    assert (report.documents, report.skipped_documents) == (1, 2)


@pytest.mark.parametrize("kind", ["text", "gzip", "jsonl"])
def test_any_amount_of_white_space_is_a_blank_document(tmp_path: Path, kind: str) -> None:
    blank = " \n\t" * 3_000_000  # twice what is encoded in one piece
    raw = jsonl([blank, "some text"]) if kind == "jsonl" else blank.encode()
    name = {"text": "a.txt", "gzip": "a.txt.gz", "jsonl": "a.jsonl"}[kind]
    corpus = write(tmp_path / "c", {name: gzip.compress(raw) if kind == "gzip" else raw})
    if kind != "jsonl":
        write(corpus, {"b.txt": "some text"})
    report = build(corpus, tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"some text", EOD]]
    assert (report.documents, report.skipped_documents) == (1, 1)
    write(corpus, {"c.txt": blank + "text"})
    with pytest.raises(UsageError, match=r"c\.txt: \d+ characters with no place"):
        build(corpus, tmp_path / "p")
    write(corpus, {"c.txt": blank[: 1 << 21] + "text"})
    build(corpus, tmp_path / "p")
    assert documents(tmp_path / "p")[-1] == [*(blank[: 1 << 21] + "text").encode(), EOD]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_json_that_is_one_array(tmp_path: Path, name: str) -> None:
    records = [{"text": "one"}, {"text": "two"}]
    for text in (json.dumps(records), json.dumps(records, indent=1)):
        source = write(tmp_path, {name: text}) / name
        with pytest.raises(UsageError, match="one JSON array, expected an object a line") as caught:
            build(source, tmp_path / "o")
        assert "jq -c" in caught.value.remedy
    source = write(tmp_path, {name: jsonl(["one", "two"])}) / name
    build(source, tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"one", EOD], [*b"two", EOD]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": {"en": "nested"}}', "line 2: field 'text': found dict, expected text"),
        ('{"text": ["a", "b"]}', "line 2: field 'text': found list, expected text"),
        ('{"text": true}', "line 2: field 'text': found bool, expected text"),
        ('{"text": 1.5}', "line 2: field 'text': found float, expected text"),
        ('{"Text": "other case"}', r"line 2: no field 'text' \(found Text\)"),
        ("{}", r"line 2: no field 'text' \(found none\)"),
        ('{"text": "a"} {"text": "b"}', "line 2, column 15: Extra data"),
        ('{"text": "a",}', "line 2, column"),
        ("{'text': 'a'}", "line 2, column 2"),
        ('"text"', "line 2: found str, expected an object"),
        ("null", "line 2: found NoneType, expected an object"),
        ('{"text": "tab\tinside"}', "line 2, column"),
    ],
)
def test_jsonl_lines_that_are_not_as_expected(tmp_path: Path, line: str, message: str) -> None:
    source = write(tmp_path, {"x.jsonl": f'{{"text": "good"}}\n{line}\n'}) / "x.jsonl"
    with pytest.raises(MindferryError, match=rf"x\.jsonl: {message}"):
        build(source, tmp_path / "o")


def test_jsonl_details_that_are_fine(tmp_path: Path) -> None:
    """The last of two equal keys counts, as in Python; other fields may hold anything; escapes are undone."""
    lines = [
        '{"text": "a", "text": "b"}',
        '{"n": [1, {"x": NaN}], "text": "\\u6570\\ud83d\\udea2"}',
        "",
        "  ",
    ]
    build(write(tmp_path, {"x.jsonl": "\r\n".join(lines)}) / "x.jsonl", tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"b", EOD], [*"数🚢".encode(), EOD]]


def arrow_table(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "dotted", "null"])
def test_text_columns_of_other_types(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    texts = ["first", None, "", "second", "first"]
    name = "a.b" if kind == "dotted" else "text"
    column = pa.array(texts, pa.large_string() if kind == "large_string" else pa.string())
    if kind == "dictionary":
        column = column.dictionary_encode()
    if kind == "null":
        path = arrow_table(tmp_path / "x.parquet", {"text": pa.nulls(3, pa.string())})
        with pytest.raises(UsageError, match=r"nothing but empty or blank documents \(3\)"):
            build(path, tmp_path / "o")
        return
    path = arrow_table(tmp_path / "x.parquet", {"id": list(range(5)), name: column})
    report = build(path, tmp_path / "o")
    assert documents(tmp_path / "o") == [[*text.encode(), EOD] for text in texts if text]
    assert (report.text_field, report.skipped_documents) == (name, 2)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"id": [1, 2]}, r"cannot tell which field holds the text \(found id\)"),
        ({"text": [1, 2]}, r"cannot tell which field holds the text \(found text\)"),
        ({"text": [b"a", b"b"]}, "cannot tell which field"),
        ({"text": [["a"], ["b"]]}, "cannot tell which field"),
        ({"text": [{"en": "a"}]}, "cannot tell which field"),
    ],
)
def test_tables_without_text(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(arrow_table(tmp_path / "x.parquet", columns), tmp_path / "o")


def test_the_second_table_lacks_the_field(tmp_path: Path) -> None:
    arrow_table(tmp_path / "a.parquet", {"text": ["one", "two"]})
    arrow_table(tmp_path / "b.parquet", {"body": ["three"]})
    with pytest.raises(UsageError, match=r"b\.parquet: no field 'text' \(found body\)"):
        build(tmp_path, tmp_path / "o")


def test_several_gzip_members_and_zstd_frames(tmp_path: Path) -> None:
    parts = [b"first part, ", b"second part"]
    for name, pack in (("x.txt.gz", gzip.compress), ("x.txt.zst", zstd)):
        source = write(tmp_path, {name: b"".join(map(pack, parts))}) / name
        build(source, tmp_path / f"o-{name}")
        assert documents(tmp_path / f"o-{name}") == [[*b"".join(parts), EOD]]


@pytest.mark.parametrize("name", ["x.txt.gz", "x.jsonl.gz", "x.txt.zst"])
def test_cut_short_anywhere(tmp_path: Path, name: str) -> None:
    plain = jsonl([f"document {i}" for i in range(200)])
    good = gzip.compress(plain) if name.endswith("gz") else zstd(plain)
    for end in {1, 5, 12, len(good) // 3, len(good) - 9, len(good) - 1}:
        source = write(tmp_path, {name: good[:end]}) / name
        with pytest.raises(MindferryError, match=name.replace(".", r"\.")):
            build(source, tmp_path / "o")
        assert not (tmp_path / "o").exists()


def test_links(tmp_path: Path) -> None:
    """A loop of directories is not followed, a link to itself is refused by name, a link to a file counts once."""
    corpus = write(tmp_path / "c", {"a.txt": "the text", "sub/b.txt": "another"})
    (corpus / "sub/up").symlink_to(corpus)
    (corpus / "again.txt").symlink_to(corpus / "a.txt")
    (corpus / "itself.txt").symlink_to(corpus / "itself.txt")
    (corpus / "nowhere.txt").symlink_to(corpus / "missing.txt")
    build(corpus, tmp_path / "o")
    assert sorted(documents(tmp_path / "o")) == sorted([[*b"the text", EOD], [*b"another", EOD]])
    for name in ("itself.txt", "nowhere.txt"):
        with pytest.raises(UsageError, match=name.replace(".", r"\.")):
            build(corpus / name, tmp_path / "p")


@pytest.mark.parametrize(
    "name", ["C:\\\\data\\\\corpus.txt", "-dash.txt", "a b (数据).txt", "new\nline.txt", "x.TXT"]
)
def test_strange_names(tmp_path: Path, name: str) -> None:
    corpus = write(tmp_path / "c", {name: "the text"})
    build(corpus, tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"the text", EOD]]
    with pytest.raises(UsageError, match="no such file or directory"):
        build(Path("C:\\nowhere\\x.txt"), tmp_path / "p")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UsageError, match="neither a file nor a directory"):
        build(tmp_path / "pipe.txt", tmp_path / "o")
    write(tmp_path, {"a.txt": "the text"})
    build(tmp_path, tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"the text", EOD]]


@pytest.mark.parametrize("n", [1 << 33, 1 << 60, (1 << 61) + 1])
def test_counts_whose_products_wrap_round(tmp_path: Path, n: int) -> None:
    """12 n + 8 d taken modulo 2^64 would be the size of the file."""
    d = (-12 * n) % (1 << 64) // 8 % (1 << 61)
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, n, d))
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(MindferryError, match=rf"{n} sequences and {d} document bounds need \d+ bytes"):
        open_megatron(tmp_path / "x")


def test_dataset_splits(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_dict({"text": ["one", "two"]})
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(UsageError, match="no split 'train'"):
        build(tmp_path / "d", tmp_path / "o")
    build(tmp_path / "d/test", tmp_path / "o")
    assert documents(tmp_path / "o") == [[*b"one", EOD], [*b"two", EOD]]
    state = json.loads((tmp_path / "d/test/state.json").read_text())
    state["_data_files"] = []
    (tmp_path / "d/test/state.json").write_text(json.dumps(state))
    with pytest.raises(MindferryError, match="lists no data files"):
        build(tmp_path / "d/test", tmp_path / "p")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), seq_length=st.integers(1, 17))
def test_every_pair_is_trained_once(tmp_path: Path, lengths: list[int], seq_length: int) -> None:
    """Packed: every adjacent pair of the stream but those left over; padded: every pair inside a document."""
    ids = np.arange(1, sum(lengths) + 1)  # each token names its place, so pairs can be counted
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    writer = MegatronWriter(tmp_path, "d", np.uint16)
    for part in parts:
        writer.add(part)
        writer.end_document()
    writer.finish(tmp_path / "d")
    data = open_megatron(tmp_path / "d")
    for packing, wanted in (
        ("pack", [(int(i), int(i) + 1) for i in ids[:-1]]),
        ("pad", [(int(a), int(b)) for part in parts for a, b in itertools.pairwise(part)]),
    ):
        counted = plan(data, seq_length, packing)
        made = list(rows(data, seq_length, packing, 0))
        assert len(made) == counted.rows
        pairs = []
        for inputs, labels, mask in made:
            assert len(inputs) == len(labels) == len(mask) == seq_length
            pairs += [(int(i), int(t)) for i, t, m in zip(inputs, labels, mask, strict=True) if m]
        left = counted.leftover_tokens if packing == "pack" else 0
        if packing == "pack" and not made:
            assert len(ids) <= seq_length
            wanted = []
        elif left:
            wanted = wanted[:-left]
        assert pairs == wanted
