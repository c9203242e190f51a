"""`mindferry data build` and `mindferry data show`, as processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data import open_megatron
from mindferry.data.statistics import judge, token_statistics

from .conftest import help_texts
from .test_mindrecord import write

PROGRAM = "import typer; from mindferry.cli import data; app = typer.Typer(); data.register(app); app()"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    directory = tmp_path_factory.mktemp("model")
    for name in ("vocab.json", "merges.txt"):
        (directory / name).write_bytes((tokenizer_dir / name).read_bytes())
    (directory / "config.json").write_text(json.dumps({"vocab_size": 640, "eos_token_id": 0}))
    return directory


def test_build_and_show(tmp_path: Path, model_dir: Path) -> None:
    corpus = write(tmp_path / "c", {f"{i}.txt": text for i, text in enumerate(help_texts())})
    out = tmp_path / "o"
    common = ["--tokenizer", model_dir, "--json"]
    done = run("data", "build", corpus, "--out", out, "--seq-length", 32, "--output", "megatron", *common)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "good"
    assert report["data"]["vocab_size"] == 640
    assert report["data"]["eod_token_id"] == 0
    data = open_megatron(out / "train")
    assert report["data"]["tokens"] == data.tokens
    assert sorted(p.name for p in out.iterdir()) == ["train.bin", "train.idx"]

    shown = json.loads(run("data", "show", out / "train.bin", *common).stdout)
    stream = data.stream()
    statistics = shown["statistics"]
    assert statistics["tokens"] == data.tokens
    assert statistics["distinct"] == len(set(stream.tolist()))
    assert statistics["eod_share"] == pytest.approx(data.num_documents / data.tokens)
    assert statistics["text"].startswith(help_texts()[0][:30])
    assert shown["verdict"] == "good"

    bad = run("data", "show", out / "train.idx", "--vocab-size", 100, "--json")
    assert bad.returncode == 1
    (finding,) = json.loads(bad.stdout)["findings"]
    assert finding["id"] == "data.token-range"

    again = run("data", "build", corpus, "--out", out, "--seq-length", 32, "--output", "megatron", *common)
    assert again.returncode == 2
    assert "exists" in json.loads(again.stdout)["findings"][0]["message"]
    forced = run("data", "build", corpus, "--out", out, "--seq-length", 32, "--force", *common)
    assert forced.returncode == 0, forced.stderr
    assert sorted(p.name for p in out.iterdir()) == ["train.mindrecord", "train.mindrecord.db"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokenizer", "/nowhere", "--seq-length", "8"], "no such directory"),
        (
            ["--tokenizer", "bytes", "--seq-length", "8", "--output", "mindrecrod"],
            "did you mean 'mindrecord'",
        ),
        (["--tokenizer", "bytes", "--seq-length", "8", "--raw-dtype", "float"], "expected one of uint16"),
        (["--tokenizer", "bytes", "--seq-length", "0"], "seq_length: found 0"),
        (["--tokenizer", "bytes", "--seq-length", "8", "--vocab-size", "0"], "vocab_size: found 0"),
        (["--tokenizer", "bytes", "--seq-length", "99999"], "expected at least 100000"),
        (["--tokenizer", "bytes", "--seq-length", "8", "--valid-fraction", "2"], "valid_fraction: found 2.0"),
    ],
)
def test_wrong_use_leaves_nothing(tmp_path: Path, words: list[str], message: str) -> None:
    corpus = write(tmp_path / "c", {"a.txt": "some text"})
    done = run("data", "build", corpus, "--out", tmp_path / "o", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


def test_interrupted_and_called_again(tmp_path: Path) -> None:
    """Ctrl-C in the middle: a clean end, nothing that looks like a data set, and the second call finishes."""
    line = " ".join(" ".join(help_texts(40)).split())
    corpus = tmp_path / "big.jsonl"
    corpus.write_text((json.dumps({"text": line}) + "\n") * 300)
    out = tmp_path / "o"
    words = ["data", "build", str(corpus), "--out", str(out), "--tokenizer", "bytes", "--seq-length", "512"]
    words += ["--output", "megatron"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        until = time.monotonic() + 60
        while not (out / ".unfinished/journal.json").exists() and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert sorted(p.name for p in out.iterdir()) == [".unfinished"]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    data = open_megatron(out / "train")
    assert data.num_documents == 300
    expected = np.frombuffer(line.encode(), np.uint8)
    for ids in (data.sequence(0), data.sequence(150), data.sequence(299)):
        np.testing.assert_array_equal(ids[:-1], expected)
    assert sorted(p.name for p in out.iterdir()) == ["train.bin", "train.idx"]


def test_statistics_by_hand() -> None:
    tokens = np.tile(np.arange(4), 16)  # 64 tokens: 33 windows of 32, of which 4 differ
    found = token_statistics(tokens, 3, eod_token_id=3)
    assert found.entropy_bits == pytest.approx(2.0)
    assert (found.distinct, found.largest, found.out_of_range) == (4, 3, 16)
    assert found.repeated_share == 1 - 4 / 33
    assert (found.eod_share, found.tokens_per_document) == (0.25, 4.0)
    assert [token for token, _, _ in found.common] == [0, 1, 2, 3]
    # A document of 100 tokens, twice in 600, at places that share no multiple: 100 - 31 windows were there before.
    tokens = np.random.default_rng(0).permutation(1000)[:600]
    tokens[431:531] = tokens[10:110]
    assert token_statistics(tokens).repeated_share == pytest.approx(69 / 569)
    empty: Any = token_statistics(np.empty(0, np.int64))
    assert empty.tokens == 0


def test_padding_and_unknown_tokens_are_said(tmp_path: Path) -> None:
    """Three documents of one word in rows of 16: 3 of 16 positions a row hold a token with a label."""
    corpus = write(tmp_path / "c", {f"{i}.txt": "abc" for i in range(3)})
    words = ["data", "build", corpus, "--out", tmp_path / "o", "--tokenizer", "bytes", "--seq-length", "16"]
    assert run(*words, "--packing", "pad").returncode == 0
    done = run("data", "show", tmp_path / "o/train.mindrecord", "--json")
    answer = json.loads(done.stdout)
    assert answer["statistics"]["padding_share"] == 13 / 16
    assert "data.padding" in [item["id"] for item in answer["findings"]]
    found = token_statistics(np.asarray([5, 0, 7, 0]), 10, unknown_token_id=0)
    assert [item.id for item in judge(found, "x", 10)] == ["data.unknown"]
    assert "50.0% of the tokens are the unknown one" in judge(found, "x", 10)[0].message
    assert [(i.id, i.severity) for i in judge(token_statistics(np.asarray([5, 10]), 10), "x", 10)] == [
        ("data.token-range", "problem")
    ]
