"""Text to MindRecord: values by hand, and read back by mindspore and mindformers themselves."""

from __future__ import annotations

import builtins
import json
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data import build_mindrecord, check_mindrecord, inspect_mindrecord
from mindferry.data.mindrecord import write_mindrecord
from mindferry.data.packing import Row, windows
from mindferry.errors import MindferryError, UsageError

from .conftest import EOD, help_texts


def write(directory: Path, texts: dict[str, str | bytes]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory


def two_rows() -> list[Row]:
    """Rows of five tokens of the stream 0..10."""
    tokens = np.arange(11, dtype=np.int32)
    ones = np.ones(5, dtype=np.int32)
    return [Row(tokens[i : i + 5], tokens[i + 1 : i + 6], ones) for i in (0, 5)]


def rows_of(path: Path) -> list[dict[str, np.ndarray]]:
    from mindspore.dataset import MindDataset

    dataset = MindDataset(dataset_files=[str(path)], shuffle=False)
    return list(dataset.create_dict_iterator(num_epochs=1, output_numpy=True))


def stream_of(path: Path) -> list[int]:
    """The token stream that the rows came from."""
    rows = rows_of(path)
    return [int(rows[0]["input_ids"][0])] + [int(t) for row in rows for t in row["labels"]]


def test_blank_documents_are_left_out(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    corpus = write(tmp_path / "c", {"1.txt": "", "2.txt": "ab", "3.txt": "  ", "4.txt": "c"})
    report = build_mindrecord(
        [corpus], letters_tokenizer, tmp_path / "out", seq_length=4, vocab_size=10, eos_token_id=9
    )
    assert stream_of(tmp_path / "out/train.mindrecord") == [1, 2, 9, 3, 9]
    assert (report.documents, report.skipped_documents, report.tokens) == (2, 2, 5)


def test_every_adjacent_pair_once(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    # Ten tokens 1..9,0: rows of 4 must share one token with their neighbour.
    corpus = write(tmp_path / "c", {"a.txt": "abcdefghi"})
    report = build_mindrecord(
        [corpus], letters_tokenizer, tmp_path / "out", seq_length=4, vocab_size=10, eos_token_id=0
    )
    rows = rows_of(tmp_path / "out/train.mindrecord")
    assert [row["input_ids"].tolist() for row in rows] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [row["labels"].tolist() for row in rows] == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert [row["loss_mask"].tolist() for row in rows] == [[1] * 4] * 2
    assert [row["position_ids"].tolist() for row in rows] == [[0, 1, 2, 3]] * 2
    assert {value.dtype for row in rows for value in row.values()} == {np.dtype(np.int32)}
    assert (report.sequences, report.leftover_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("tokens", "seq_length", "expected"),
    [(10, 4, (2, 1)), (9, 4, (2, 0)), (5, 4, (1, 0)), (4, 4, (0, 4)), (1, 4, (0, 1)), (0, 4, (0, 0))],
)
def test_windows(tokens: int, seq_length: int, expected: tuple[int, int]) -> None:
    assert windows(tokens, seq_length) == expected


def test_labels_are_shifted_exactly_once(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    corpus = write(tmp_path / "c", {"a.txt": "efgh"})
    build_mindrecord(
        [corpus], letters_tokenizer, tmp_path / "o", seq_length=3, vocab_size=10, eos_token_id=None
    )
    (row,) = rows_of(tmp_path / "o/train.mindrecord")
    pairs = list(zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True))
    assert pairs == [(5, 6), (6, 7), (7, 8)]


def test_id_beyond_the_vocabulary(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    corpus = write(tmp_path / "c", {"a.txt": "abab", "b.txt": "bahac"})
    with pytest.raises(
        MindferryError, match=r"b\.txt: token 8 at position 2, expected ids below 8"
    ) as caught:
        build_mindrecord(
            [corpus], letters_tokenizer, tmp_path / "o", seq_length=2, vocab_size=8, eos_token_id=0
        )
    assert caught.value.exit_code == 1
    assert not (tmp_path / "o").exists()


def test_inspection_finds_what_a_run_would_miss(tmp_path: Path) -> None:
    path = tmp_path / "train.mindrecord"
    write_mindrecord(path, two_rows(), 5)
    info = inspect_mindrecord(path)
    assert info.rows == 2
    assert {name: (c.dtype, c.shape) for name, c in info.columns.items()} == dict.fromkeys(
        ("input_ids", "labels", "loss_mask", "position_ids"), ("int32", (5,))
    )
    assert check_mindrecord(path, ["input_ids", "labels"], 5).rows == 2
    with pytest.raises(UsageError, match="no column attention_mask"):
        check_mindrecord(path, ["input_ids", "attention_mask"], 5)
    with pytest.raises(UsageError, match=r"shape \[5\], expected \[4\]"):
        check_mindrecord(path, ["input_ids"], 4)
    (tmp_path / "train.mindrecord.db").unlink()
    with pytest.raises(UsageError, match=r"train\.mindrecord\.db: missing"):
        inspect_mindrecord(path)


def test_inspection_of_a_foreign_file(tmp_path: Path) -> None:
    from mindspore.mindrecord import FileWriter

    path = tmp_path / "foreign.mindrecord"
    writer = FileWriter(str(path), shard_num=1)
    writer.add_schema(
        {"input_ids": {"type": "int32", "shape": [-1]}, "mask": {"type": "int64", "shape": [-1]}}, "x"
    )
    writer.write_raw_data(
        [{"input_ids": np.arange(4, dtype=np.int32), "mask": np.ones(4, dtype=np.int64)}] * 3
    )
    writer.commit()
    with pytest.raises(UsageError, match=r"shape \[4\], expected \[5\]"):
        check_mindrecord(path, ["input_ids"], 5)
    with pytest.raises(UsageError, match="mask: found int64, expected int32"):
        check_mindrecord(path, ["mask"], 4)
    assert check_mindrecord(path, ["input_ids"], 4).rows == 3


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.mindrecord"
    write_mindrecord(path, two_rows(), 5)
    good = path.read_bytes()
    with_length = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])
    assert with_length["schema"][0]["blob_fields"] == ["input_ids", "labels", "loss_mask", "position_ids"]
    for bad in (
        b"",
        good[:7],
        good[:100],
        good[:-1],
        good + b"\0",
        b"\xff" * 8 + good[8:],
        b"\0" * len(good),
    ):
        path.write_bytes(bad)
        with pytest.raises(MindferryError, match=r"train\.mindrecord: "):
            inspect_mindrecord(path)
    path.write_bytes(good)
    index = tmp_path / "train.mindrecord.db"
    index.write_bytes(b"not sqlite at all" * 100)
    with pytest.raises(MindferryError, match="no index of a MindRecord"):
        inspect_mindrecord(path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> dict[str, Any]:
    """A real corpus, built into a staging directory that is then moved, as `migrate` does."""
    root = tmp_path_factory.mktemp("built")
    corpus = write(root / "corpus", {f"{i:02d}.txt": text for i, text in enumerate(help_texts())})
    files = {"tokenizer.json": tokenizer_dir / "tokenizer.json"}
    report = build_mindrecord(
        [corpus], files, root / ".run.partial-1" / "data", seq_length=64, vocab_size=600, eos_token_id=0
    )
    os.rename(root / ".run.partial-1", root / "run 1 (数据)")
    return {"report": report, "path": root / "run 1 (数据)/data/train.mindrecord"}


def expected_rows(tokenizer_dir: Path, seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids, labels) by plain slicing of what the tokenizers library says."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    stream = np.concatenate([[*tokenizer.encode(text).ids, 0] for text in help_texts() if text.strip()])
    rows = (len(stream) - 1) // seq_length
    return (
        stream[: rows * seq_length].reshape(rows, seq_length),
        stream[1 : rows * seq_length + 1].reshape(rows, seq_length),
    )


def test_moved_file_reads_back_in_mindspore(built: dict[str, Any], tokenizer_dir: Path) -> None:
    inputs, labels = expected_rows(tokenizer_dir, 64)
    rows = rows_of(built["path"])
    assert len(rows) == built["report"].sequences == len(inputs) > 100
    np.testing.assert_array_equal(np.stack([row["input_ids"] for row in rows]), inputs)
    np.testing.assert_array_equal(np.stack([row["labels"] for row in rows]), labels)


def test_mindformers_dataset_gives_the_same_batches(built: dict[str, Any], tokenizer_dir: Path) -> None:
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig

    columns = ["input_ids", "labels", "loss_mask", "position_ids"]
    config = MindFormerConfig(
        data_loader={"type": "MindDataset", "dataset_files": [str(built["path"])], "shuffle": False},
        input_columns=columns,
        construct_args_key=columns,
        batch_size=4,
        drop_remainder=True,
        num_parallel_workers=1,
        python_multiprocessing=False,
        repeat=1,
        seed=0,
        prefetch_size=1,
        numa_enable=False,
    )
    dataset = CausalLanguageModelDataset(dataset_config=config)
    inputs, labels = expected_rows(tokenizer_dir, 64)
    batches = len(inputs) // 4
    assert dataset.get_dataset_size() == batches
    for number, batch in enumerate(dataset.create_dict_iterator(num_epochs=1, output_numpy=True)):
        at = slice(4 * number, 4 * number + 4)
        assert {name: value.dtype for name, value in batch.items()} == dict.fromkeys(
            columns, np.dtype("int32")
        )
        np.testing.assert_array_equal(batch["input_ids"], inputs[at])
        np.testing.assert_array_equal(batch["labels"], labels[at])
        np.testing.assert_array_equal(batch["loss_mask"], np.ones((4, 64)))
        np.testing.assert_array_equal(batch["position_ids"], np.tile(np.arange(64), (4, 1)))
    assert number == batches - 1


def test_report(built: dict[str, Any], tokenizer_dir: Path) -> None:
    report = built["report"]
    data = json.loads(json.dumps(report.to_json()))
    assert data["columns"]["labels"] == {"dtype": "int32", "shape": [64]}
    assert data["files"] == ["train.mindrecord.db", "train.mindrecord"]
    assert data["tokens"] == data["sequences"] * 64 + 1 + data["leftover_tokens"]
    assert data["documents"] == sum(bool(text.strip()) for text in help_texts())
    assert data["warnings"] == []


def test_modes_follow_the_umask(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    corpus = write(tmp_path / "c", {"a.txt": "abc"})
    before = os.umask(0o027)
    try:
        build_mindrecord(
            [corpus], letters_tokenizer, tmp_path / "o", seq_length=2, vocab_size=10, eos_token_id=0
        )
    finally:
        os.umask(before)
    for name in ("train.mindrecord", "train.mindrecord.db"):
        assert stat.S_IMODE((tmp_path / "o" / name).stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path / "o")) == ["train.mindrecord", "train.mindrecord.db"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a.txt": ""}, "nothing but empty or blank documents"),
        ({"a.txt": " \n\t", "b.txt": ""}, "nothing but empty or blank documents"),
        ({"a.txt": "ab"}, r"a\.txt: 3 tokens, expected at least 6 for one sequence of 5"),
        ({"a.bin": "ab"}, r"no files ending in \.txt, "),
        ({}, r"no files ending in \.txt, "),
        ({"a.txt": "hello".encode("utf-16")}, "is UTF-16, expected UTF-8"),
    ],
)
def test_useless_corpus(
    tmp_path: Path, letters_tokenizer: dict[str, Path], texts: dict[str, str | bytes], message: str
) -> None:
    corpus = write(tmp_path / "c", texts)
    with pytest.raises(UsageError, match=message):
        build_mindrecord(
            [corpus], letters_tokenizer, tmp_path / "o", seq_length=5, vocab_size=10, eos_token_id=0
        )
    assert not (tmp_path / "o").exists()


def test_missing_path_and_tokenizer(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    sizes = {"seq_length": 2, "vocab_size": 10, "eos_token_id": 0}
    with pytest.raises(UsageError, match="nowhere: no such file or directory"):
        build_mindrecord([tmp_path / "nowhere"], letters_tokenizer, tmp_path / "o", **sizes)
    corpus = write(tmp_path / "c", {"a.txt": "abc", "vocab.json": "{}"})
    with pytest.raises(UsageError, match=r"neither tokenizer\.json nor vocab\.json \+ merges\.txt nor"):
        build_mindrecord([corpus], {}, tmp_path / "o", **sizes)
    with pytest.raises(UsageError, match=r"merges\.txt is missing"):
        build_mindrecord([corpus], {"vocab.json": corpus / "vocab.json"}, tmp_path / "o", **sizes)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_length": 0}, "seq_length: found 0"),
        ({"vocab_size": 0}, "vocab_size: found 0"),
        ({"vocab_size": 1 << 32}, "ids are int32"),
        ({"eos_token_id": 10}, "eos_token_id: found 10"),
        ({"seq_length": 1 << 27}, "expected at least 134217729"),
    ],
)
def test_settings(
    tmp_path: Path, letters_tokenizer: dict[str, Path], changed: dict[str, int], message: str
) -> None:
    corpus = write(tmp_path / "c", {"a.txt": "abc"})
    sizes = {"seq_length": 2, "vocab_size": 10, "eos_token_id": 0} | changed
    with pytest.raises(UsageError, match=message):
        build_mindrecord([corpus], letters_tokenizer, tmp_path / "o", **sizes)
    assert not (tmp_path / "o").exists()


def test_invalid_utf8_is_counted(tmp_path: Path, tokenizer_files: dict[str, Path]) -> None:
    corpus = write(tmp_path / "c", {"a.txt": b"\xef\xbb\xbfab\xff\xfecd \xe4\xb8\xad\xe4\xb8"})
    report = build_mindrecord(
        [corpus], tokenizer_files, tmp_path / "o", seq_length=8, vocab_size=600, eos_token_id=None
    )
    assert report.invalid_utf8_bytes == 4
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_files["tokenizer.json"]))
    ids = tokenizer.encode("ab\ufffd\ufffdcd 中\ufffd\ufffd").ids
    assert report.tokens == len(ids)
    assert stream_of(tmp_path / "o/train.mindrecord") == ids[: 1 + 8 * ((len(ids) - 1) // 8)]
    assert any("4 bytes" in text for text in report.warnings)
    assert any("eos_token_id" in text for text in report.warnings)


def test_directory_order_and_hidden_files(tmp_path: Path, letters_tokenizer: dict[str, Path]) -> None:
    corpus = write(
        tmp_path / "c",
        {"b.txt": "b", "a/z.md": "a", "a.txt": "c", ".hidden.txt": "d", ".git/x.txt": "e", "pic.png": "f"},
    )
    build_mindrecord(
        [corpus, corpus / "b.txt"],
        letters_tokenizer,
        tmp_path / "o",
        seq_length=5,
        vocab_size=10,
        eos_token_id=0,
    )
    assert stream_of(tmp_path / "o/train.mindrecord") == [1, 0, 3, 0, 2, 0]


def test_progress_counts_bytes(tmp_path: Path, tokenizer_files: dict[str, Path]) -> None:
    class Bar:
        total = 0

        def advance(self, n: int, note: str = "") -> None:
            self.total += n

    corpus = write(tmp_path / "c", {f"{i}.txt": text for i, text in enumerate(help_texts(10))})
    bar = Bar()
    build_mindrecord(
        [corpus],
        tokenizer_files,
        tmp_path / "o",
        seq_length=32,
        vocab_size=600,
        eos_token_id=0,
        progress=bar,
    )
    assert bar.total == sum(len(text.encode()) for text in help_texts(10))


def test_full_device(
    tmp_path: Path, tokenizer_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token file lies on a real device that takes no byte."""
    corpus = write(tmp_path / "c", {"a.txt": "".join(help_texts(5))})
    real = builtins.open

    def open_full(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return real("/dev/full" if str(path).endswith("tokens") else path, mode, *args, **kwargs)

    monkeypatch.setattr("mindferry.data.megatron.open", open_full, raising=False)
    with pytest.raises(MindferryError, match=r"no space for the data: about \d+ bytes needed") as caught:
        build_mindrecord(
            [corpus], tokenizer_files, tmp_path / "o", seq_length=8, vocab_size=600, eos_token_id=0
        )
    assert caught.value.id == "disk.full"
    assert not (tmp_path / "o").exists()


_ON_A_SMALL_DISK = """
import sys
from pathlib import Path
from mindferry.data import build_mindrecord
from mindferry.errors import MindferryError
corpus, tokenizer, disk = map(Path, sys.argv[1:])
for kind in ("existing", "new"):
    out = disk if kind == "existing" else disk / "new"
    try:
        build_mindrecord([corpus], {"tokenizer.json": tokenizer}, out, seq_length=64, vocab_size=600,
                         eos_token_id=0)
    except MindferryError as err:
        assert err.id == "disk.full", err
        print(err.message)
    assert list(disk.iterdir()) == [], list(disk.iterdir())
"""


@pytest.mark.parametrize("kib", [64, 1500])
def test_small_disk(tmp_path: Path, tokenizer_files: dict[str, Path], kib: int) -> None:
    """A real file system that is too small: for the tokens, and for the rows."""
    corpus = write(tmp_path / "c", {"a.txt": "\n".join(help_texts(80))})
    disk = tmp_path / "disk"
    disk.mkdir()
    script = tmp_path / "build.py"
    script.write_text(_ON_A_SMALL_DISK)
    words = [sys.executable, str(script), str(corpus), str(tokenizer_files["tokenizer.json"]), str(disk)]
    inside = f"mount -t tmpfs -o size={kib}k tmpfs {shlex.quote(str(disk))} && exec {shlex.join(words)}"
    namespaces = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    probe = subprocess.run([*namespaces, "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("needs leave to mount a small file system")
    done = subprocess.run([*namespaces, "sh", "-c", inside], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("bytes needed") == 2


def test_end_of_text_in_the_text_is_special(tmp_path: Path, tokenizer_dir: Path) -> None:
    """As transformers does it, from either set of files."""
    corpus = write(tmp_path / "c", {"a.txt": f"one{EOD}two words"})
    streams = []
    for number, names in enumerate((["tokenizer.json"], ["vocab.json", "merges.txt"])):
        out = tmp_path / str(number)
        files = {name: tokenizer_dir / name for name in names}
        build_mindrecord([corpus], files, out, seq_length=4, vocab_size=600, eos_token_id=None)
        streams.append(stream_of(out / "train.mindrecord"))
    assert streams[0] == streams[1]
    assert 0 in streams[0]


def test_an_index_whose_schema_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "train.mindrecord"
    write_mindrecord(path, two_rows(), 5)
    index = tmp_path / "train.mindrecord.db"
    damaged = index.read_bytes().replace(b"CREATE TABLE INDEXES", b"CREATE \xd9ABLE INDEXES")
    assert damaged != index.read_bytes()
    index.write_bytes(damaged)
    with pytest.raises(MindferryError, match="no index of a MindRecord"):
        inspect_mindrecord(path)
