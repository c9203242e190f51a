"""migrate: what it writes, what it refuses, and that refusal leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.targets import run_yaml

from ..support import make_run, run_cli

SECTIONS = (
    *(
        "trainer",
        "runner_config",
        "runner_wrapper",
        "optimizer",
        "lr_schedule",
        "train_dataset",
        "train_dataset_task",
    ),
    *("context", "parallel", "parallel_config", "recompute_config", "callbacks", "model"),
)


def test_what_is_written(source: Path, corpus: Path, tmp_path: Path) -> None:
    run = make_run(source, corpus, tmp_path / "run")
    content = run_yaml.load_yaml(run / "run.yaml")
    assert set(SECTIONS) <= content.keys()
    assert content["model"]["model_config"]["type"] == "GPT2Config"
    assert content["model"]["arch"]["type"] == "GPT2ForTraining"
    tensors = load_file(run / "model" / "model.safetensors")
    assert tensors["decoder.layers.0.mlp.linear_fc1.weight"].shape == (192, 48)
    assert (run / "data" / "train.mindrecord.db").is_file()

    report = json.loads((run / "migration.json").read_text(encoding="utf-8"))
    source_config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    accounted = {row["source_key"] for row in report["config"]}
    assert source_config.keys() <= accounted, "every key of config.json went somewhere or has a reason"
    source_tensors = load_file(source / "model.safetensors")
    assert {row["source"] for row in report["weights"]["used"]} == source_tensors.keys()
    differing = {row["target_key"]: row["value"] for row in report["target_defaults_that_differ"]}
    assert differing["position_embedding_type"] == "learned_absolute"
    assert differing["pad_token_id"] == -1
    assert differing["compute_dtype"] == "float32"


def test_weights_are_carried_over_exactly(source: Path, corpus: Path, tmp_path: Path) -> None:
    theirs = load_file(source / "model.safetensors")
    ours = load_file(make_run(source, corpus, tmp_path / "run") / "model" / "model.safetensors")
    np.testing.assert_array_equal(
        ours["decoder.layers.1.self_attention.linear_proj.weight"],
        theirs["transformer.h.1.attn.c_proj.weight"].T,
    )
    query, key, value = np.split(theirs["transformer.h.1.attn.c_attn.bias"].reshape(3, 4, 12), 3)
    packed = np.concatenate([query[0], key[0], value[0]], axis=1).reshape(-1)
    np.testing.assert_array_equal(ours["decoder.layers.1.self_attention.linear_qkv.bias"], packed)


def test_file_modes_follow_the_umask(source: Path, corpus: Path, tmp_path: Path) -> None:
    """safetensors writes 0600, which a team's other accounts cannot read."""
    old = os.umask(0o022)
    try:
        run = make_run(source, corpus, tmp_path / "run")
    finally:
        os.umask(old)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in run.rglob("*") if path.is_file()}
    assert set(modes.values()) == {"0o644"}, modes


def test_json_and_several_data_arguments(source: Path, corpus: Path, tmp_path: Path) -> None:
    files = sorted(corpus.iterdir())
    done = run_cli(
        "migrate", source, "--data", *files, "--out", tmp_path / "run", "--seq-length", "32", "--json"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["command"] == "migrate"
    assert answer["verdict"] == "good"
    assert answer["run"] == str(tmp_path / "run")
    assert answer["weights"]["used"] == 28
    assert answer["data"]["documents"] == len(files)
    assert {"source_key", "target_key", "source_value", "target_value", "note"} <= answer["config"][0].keys()


def edit_config(source: Path, **changes: Any) -> None:
    path = source / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.update(changes)
    path.write_text(json.dumps(config), encoding="utf-8")


def edit_weights(source: Path, change: Any) -> None:
    path = source / "model.safetensors"
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def wrong_shape(tensors: dict[str, np.ndarray]) -> None:
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"][:-1].copy()


# (what is broken, how, what the message must name)
BAD_SOURCES: list[tuple[str, Any, str]] = [
    ("no config.json", lambda s: (s / "config.json").unlink(), "config.json"),
    ("another family", lambda s: edit_config(s, model_type="bert"), "bert"),
    ("no model_type", lambda s: edit_config(s, model_type=None), "model_type"),
    ("missing tensor", lambda s: edit_weights(s, lambda t: t.pop("transformer.ln_f.bias")), "ln_f.bias"),
    ("surplus tensor", lambda s: edit_weights(s, lambda t: t.update(extra=np.zeros(2, np.float32))), "extra"),
    ("wrong shape", lambda s: edit_weights(s, wrong_shape), "wpe.weight"),
    ("not JSON", lambda s: (s / "config.json").write_text("{", encoding="utf-8"), "config.json"),
    ("no weights", lambda s: (s / "model.safetensors").unlink(), "model.safetensors"),
    ("truncated weights", lambda s: os.truncate(s / "model.safetensors", 1000), "model.safetensors"),
    ("unknown activation", lambda s: edit_config(s, activation_function="mish"), "mish"),
]


@pytest.mark.parametrize(("damage", "named"), [b[1:] for b in BAD_SOURCES], ids=[b[0] for b in BAD_SOURCES])
def test_bad_sources(source: Path, corpus: Path, tmp_path: Path, damage: Any, named: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    damage(broken)
    out = tmp_path / "run"
    done = run_cli("migrate", broken, "--data", corpus, "--out", out, "--seq-length", "32")
    assert done.returncode in (1, 2)
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"], "nothing is left at RUN or beside it"


@pytest.mark.parametrize(
    ("texts", "seq_length", "code", "named"),
    [
        ([], "32", 2, "corpus"),
        ([""], "32", 2, "corpus"),
        (["too short"], "32", 2, "sequence"),
        (["word " * 500], "65", 2, "64"),
        (["word " * 500], "0", 2, "seq-length"),
    ],
    ids=["no files", "empty file", "shorter than a sequence", "above n_positions", "zero"],
)
def test_bad_corpus_or_length(
    source: Path, tmp_path: Path, texts: list[str], seq_length: str, code: int, named: str
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, text in enumerate(texts):
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    out = tmp_path / "run"
    done = run_cli("migrate", source, "--data", corpus, "--out", out, "--seq-length", seq_length)
    assert done.returncode == code, done.stderr
    assert named in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus"]


def test_a_run_is_replaced_only_when_told(source: Path, corpus: Path, tmp_path: Path) -> None:
    out = make_run(source, corpus, tmp_path / "run")
    before = (out / "run.yaml").read_bytes()
    arguments = ("migrate", source, "--data", corpus, "--out", out, "--seq-length", "16")
    refused = run_cli(*arguments)
    assert refused.returncode == 2
    assert "--force" in refused.stderr
    assert (out / "run.yaml").read_bytes() == before
    assert run_cli(*arguments, "--force").returncode == 0
    assert (out / "run.yaml").read_bytes() != before


def test_force_never_deletes_what_is_no_run(source: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work", encoding="utf-8")
    done = run_cli("migrate", source, "--data", corpus, "--out", out, "--seq-length", "16", "--force")
    assert done.returncode == 2
    assert (out / "thesis.tex").read_text(encoding="utf-8") == "years of work"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_nothing(source: Path, corpus: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("this sandbox cannot mount a tmpfs")
    try:
        done = run_cli("migrate", source, "--data", corpus, "--out", small / "run", "--seq-length", "32")
        left = list(small.iterdir())
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert done.returncode == 1
    assert "space" in done.stderr
    assert left == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from mindferry.data import tokens
from mindferry.migration import Choices, Ticks, migrate
source, corpus, out = map(Path, sys.argv[1:])
tokens.BATCH_CHARACTERS, tokens.JOURNAL_CHARACTERS = 5_000, 20_000
class Killer:
    calls = 0
    def advance(self, n, note=""):
        self.calls += 1
        if self.calls == 12:
            os.kill(os.getpid(), signal.SIGKILL)
migrate(source, [corpus], out, Choices(seq_length=32, steps=60), ticks=Ticks(data=Killer()))
"""


def test_killed_in_the_data_it_goes_on_there(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """SIGKILL while tokenizing: the second call does the rest only, and the data are byte for byte the same."""
    from mindferry.data import tokens

    corpus = tmp_path / "corpus.jsonl"
    texts = [f"document {i}, with the number {i * i} in it" * 5 for i in range(1000)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = make_run(source, corpus, tmp_path / "a" / "run")
    out = tmp_path / "b" / "run"
    words = [sys.executable, "-c", _KILLED, str(source), str(corpus), str(out)]
    done = subprocess.run(words, capture_output=True, check=False, timeout=200)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert (out.parent / ".run.unfinished" / "journal.json").is_file()
    loaded = []
    real = tokens.Journal.load.__func__  # type: ignore[attr-defined]

    def load(cls: Any, path: Path, fingerprint: str) -> Any:
        loaded.append(real(cls, path, fingerprint))
        characters.append(loaded[-1].counts.characters)
        return loaded[-1]

    characters: list[int] = []
    monkeypatch.setattr(tokens.Journal, "load", classmethod(load))
    make_run(source, corpus, out)
    assert characters[0] >= 20_000  # what was done is not done again
    for name in ("train.mindrecord", "train.mindrecord.db"):
        assert (out / "data" / name).read_bytes() == (whole / "data" / name).read_bytes(), name
    assert [path.name for path in out.parent.iterdir()] == ["run"]
