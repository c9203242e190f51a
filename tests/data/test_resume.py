"""The same bytes whatever the number of workers, and whenever the work was killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindferry.data import ByteTokenizer, DataOptions, build_dataset, load_tokenizer
from mindferry.data import tokens as engine
from mindferry.errors import UsageError

from .conftest import help_texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, records and one long document, about 0.9 MB."""
    directory = tmp_path_factory.mktemp("corpus")
    texts = help_texts(60)
    for i, text in enumerate(texts[:20]):
        (directory / f"{i:02d}.txt").write_text(text)
    (directory / "records.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (directory / "z-long.txt").write_text("\n".join(texts) * 2)
    return directory


def build(
    corpus: Path, tokenizer_dir: Path, out: Path, work: Path | None = None, **kwargs: Any
) -> dict[str, str]:
    """Digests of all files written."""
    build_dataset(
        [corpus],
        load_tokenizer({"tokenizer.json": tokenizer_dir / "tokenizer.json"}),
        out,
        seq_length=64,
        vocab_size=600,
        eos_token_id=0,
        options=DataOptions(output="megatron", valid_fraction=0.2, workers=kwargs.pop("workers", 2)),
        work_dir=work,
        **kwargs,
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


@pytest.fixture(scope="module")
def expected(corpus: Path, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    digests = build(corpus, tokenizer_dir, tmp_path_factory.mktemp("expected") / "o", workers=1)
    assert sorted(digests) == ["train.bin", "train.idx", "valid.bin", "valid.idx"]
    return digests


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("batch", [1, 5_000, 1 << 18])
def test_any_number_of_workers(
    corpus: Path,
    tokenizer_dir: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    batch: int,
) -> None:
    monkeypatch.setattr(engine, "BATCH_CHARACTERS", batch)
    assert build(corpus, tokenizer_dir, tmp_path / "o", workers=workers) == expected


_KILLED = """
import os, signal, sys
from pathlib import Path
from mindferry.data import DataOptions, build_dataset, load_tokenizer
from mindferry.data import tokens as engine
corpus, tokenizer, out, work, after = sys.argv[1:]
engine.BATCH_CHARACTERS, engine.JOURNAL_CHARACTERS = 10_000, 100_000
class Killer:
    calls = 0
    def advance(self, n, note=""):
        self.calls += 1
        if self.calls == int(after):
            os.kill(os.getpid(), signal.SIGKILL)
build_dataset([Path(corpus)], load_tokenizer({"tokenizer.json": Path(tokenizer) / "tokenizer.json"}), Path(out),
              seq_length=64, vocab_size=600, eos_token_id=0, work_dir=Path(work), progress=Killer(),
              options=DataOptions(output="megatron", valid_fraction=0.2, workers=2))
"""


@pytest.mark.parametrize("after", [2, 10, 17, 24])
def test_killed_and_run_again(
    corpus: Path, tokenizer_dir: Path, expected: dict[str, str], tmp_path: Path, after: int
) -> None:
    out, work = tmp_path / "o", tmp_path / "work"
    words = [sys.executable, "-c", _KILLED, str(corpus), str(tokenizer_dir), str(out), str(work), str(after)]
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (work / "journal.json").exists() == (after > 2)
    assert not list(out.iterdir())
    encoded: list[int] = []
    tokenizer = load_tokenizer({"tokenizer.json": tokenizer_dir / "tokenizer.json"})
    real = tokenizer.encode

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __init__(self) -> None:
            vars(self).update(vars(tokenizer))

        def encode(self, texts: list[str]) -> Any:
            encoded.extend(len(text) for text in texts)
            return real(texts)

    build_dataset(
        [corpus],
        Counting(),
        out,
        seq_length=64,
        vocab_size=600,
        eos_token_id=0,
        work_dir=work,
        options=DataOptions(output="megatron", valid_fraction=0.2, workers=3),
    )
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}
    assert digests == expected
    assert not work.exists()
    total = sum(path.stat().st_size for path in corpus.iterdir())
    if after > 20:
        assert sum(encoded) < 0.6 * total  # what was done is not done again


_KILLED_WRITING = """
import os, signal, sys
from pathlib import Path
from mindferry.data import ByteTokenizer, build_dataset, mindrecord
corpus, out, work = map(Path, sys.argv[1:])
real = mindrecord.write_mindrecord
def half(path, rows, seq_length):
    real(path, rows, seq_length)
    os.kill(os.getpid(), signal.SIGKILL)
mindrecord.write_mindrecord = half
build_dataset([corpus], ByteTokenizer(), out, seq_length=64, vocab_size=257, eos_token_id=256, work_dir=work)
"""


def test_killed_while_the_rows_are_written(corpus: Path, tmp_path: Path) -> None:
    """Nothing is tokenized again, and what the dead process wrote does no harm."""
    out, work = tmp_path / "o", tmp_path / "work"
    words = [sys.executable, "-c", _KILLED_WRITING, str(corpus), str(out), str(work)]
    done = subprocess.run(words, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not list(out.iterdir())

    class Idle(ByteTokenizer):
        def encode(self, texts: list[str]) -> Any:
            raise AssertionError("tokenized again")

    sizes: dict[str, Any] = {"seq_length": 64, "vocab_size": 257, "eos_token_id": 256}
    report = build_dataset([corpus], Idle(), out, work_dir=work, **sizes)
    whole = build_dataset([corpus], ByteTokenizer(), tmp_path / "whole", **sizes)
    assert report == whole
    for name in whole.files:
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not work.exists()


def test_changed_input_starts_over(
    corpus: Path, tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in help_texts(61)]
    source.write_text("".join(lines[:60]))
    monkeypatch.setattr(engine, "BATCH_CHARACTERS", 10_000)
    monkeypatch.setattr(engine, "JOURNAL_CHARACTERS", 20_000)
    monkeypatch.setattr("mindferry.data.inputs.PIECE_CHARACTERS", 8_000)

    class Stop(Exception):
        pass

    class Stopper:
        calls = 0

        def advance(self, n: int, note: str = "") -> None:
            self.calls += 1
            if self.calls == 4:
                raise Stop

    with pytest.raises(Stop):
        build(source, tokenizer_dir, tmp_path / "o", tmp_path / "work", progress=Stopper())
    assert (tmp_path / "work/journal.json").exists()
    source.write_text("".join(lines))
    again = build(source, tokenizer_dir, tmp_path / "o", tmp_path / "work")
    assert again == build(source, tokenizer_dir, tmp_path / "p")


@pytest.mark.parametrize("damage", ["journal", "tokens", "lengths"])
def test_damaged_work_starts_over(
    corpus: Path, tokenizer_dir: Path, expected: dict[str, str], tmp_path: Path, damage: str
) -> None:
    out, work = tmp_path / "o", tmp_path / "work"
    words = [sys.executable, "-c", _KILLED, str(corpus), str(tokenizer_dir), str(out), str(work), "17"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == -signal.SIGKILL
    if damage == "journal":
        (work / "journal.json").write_text('{"fingerprint": 3, "counts"')
    else:
        os.truncate(work / f"train.{damage}", 4)
    assert build(corpus, tokenizer_dir, out, work) == expected


def test_two_at_once(corpus: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    from filelock import FileLock

    (tmp_path / "work").mkdir()
    with (
        FileLock(tmp_path / "work/lock"),
        pytest.raises(UsageError, match="another process is working there"),
    ):
        build(corpus, tokenizer_dir, tmp_path / "o", tmp_path / "work")


_BIG = """
import sys
from pathlib import Path
from mindferry.data import ByteTokenizer, DataOptions, build_dataset, load_tokenizer
source, tokenizer, out = map(Path, sys.argv[1:])
build_dataset([source], load_tokenizer({"tokenizer.json": tokenizer / "tokenizer.json"}), out, seq_length=64,
              vocab_size=600, eos_token_id=0, options=DataOptions(output="megatron"))
# Not ru_maxrss: a child begins with that of its parent.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.parametrize("megabytes", [8, pytest.param(300, marks=pytest.mark.long)])
def test_memory_is_bounded(tokenizer_dir: Path, tmp_path: Path, megabytes: int) -> None:
    """One document in one line, larger than what is held at a time."""
    text = " ".join(" ".join(help_texts(40)).split())
    source = tmp_path / "line.txt"
    with open(source, "w") as out:
        while out.tell() < megabytes << 20:
            out.write(text)
    words = [sys.executable, "-c", _BIG, str(source), str(tokenizer_dir), str(tmp_path / "o")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400 << 10  # KiB; the limit promised is 1 GB


_EDGES = """
import sys
from pathlib import Path
from mindferry.data import ByteTokenizer, DataOptions, build_dataset
from mindferry.errors import UsageError
source, out = map(Path, sys.argv[1:])
try:
    report = build_dataset([source], ByteTokenizer(), out, seq_length=64, vocab_size=257, eos_token_id=256,
                           options=DataOptions(output="megatron"))
    print(report.tokens)
except UsageError as err:
    print(err.message)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def edge(path: Path, kind: str, megabytes: int) -> str:
    """A source of `megabytes` at `path`; returns the first line that building it prints."""
    block = "some words of text " * (1 << 16)
    count = -(-(megabytes << 20) // len(block))
    if kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet

        schema = pa.schema([("text", pa.string())])
        with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd", write_batch_size=4) as writer:
            writer.write_table(pa.table({"text": [block] * count}, schema), row_group_size=count)
        return str(count * (len(block) + 1))
    if kind == "gzip":
        import gzip

        with gzip.open(path, "wb", compresslevel=1) as out:
            for _ in range(count):
                out.write(block.encode())
        return str(count * len(block) + 1)
    with open(path, "w") as out:
        out.write('{"text": "' if kind == "jsonl" else "")
        for _ in range(count):
            out.write(block if kind != "one word" else "x" * len(block))
        out.write('"}' if kind == "jsonl" else "")
    if kind == "jsonl":
        return f"{path}: line 1: longer than 67108864 bytes"
    if kind == "one word":
        return f"{path}: 8388608 characters with no place where this tokenizer's ids stay the same when the text is cut"
    return str(count * len(block) + 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["text", "one word", "jsonl", "parquet", "gzip"])
def test_a_gigabyte_in_one_line_one_column_or_one_gzip(tmp_path: Path, kind: str) -> None:
    """Below 1 GB of memory, or one clear line."""
    suffix = {"jsonl": ".jsonl", "parquet": ".parquet", "gzip": ".txt.gz"}.get(kind, ".txt")
    source = tmp_path / f"big{suffix}"
    expected = edge(source, kind, 1024)
    words = [sys.executable, "-c", _EDGES, str(source), str(tmp_path / "o")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    first, memory = done.stdout.splitlines()
    assert first == expected
    assert int(memory) < 700 << 10
    source.unlink()
    shutil.rmtree(tmp_path / "o", ignore_errors=True)
