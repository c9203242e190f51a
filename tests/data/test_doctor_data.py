"""`mindferry doctor data` on a real migrated run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindferry.data.pipeline import (
    Settings,
    StepTimes,
    Timing,
    build_pipeline,
    candidates,
    measure,
    step_times,
)
from mindferry.errors import MindferryError

from .conftest import help_texts
from .test_mindrecord import write

PROGRAM = (
    "import typer; from mindferry.cli import doctor_data; app = typer.Typer(); doctor_data.register(app);"
    "app.command('x')(lambda: None); app()"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A migrated GPT-2 of one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from mindferry.migration import Choices, migrate

    root = tmp_path_factory.mktemp("doctor")
    source = root / "gpt2"
    config = GPT2Config(
        vocab_size=600, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(str(source))
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (source / name).write_bytes((tokenizer_dir / name).read_bytes())
    corpus = write(root / "corpus", {f"{i:02d}.txt": text for i, text in enumerate(help_texts())})
    migrate(source, [corpus], root / "run", Choices(seq_length=64, batch_size=4))
    return root / "run"


def doctor(*words: object) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "data", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


def metrics(run: Path, data_time: float, compute_time: float, first: float = 5.0) -> None:
    """Steps as training writes them; the first ones compile."""
    rows = [
        {
            "step": step,
            "data_time": first if step <= 3 else data_time,
            "compute_time": first if step <= 3 else compute_time,
            "step_time": first if step <= 3 else data_time + compute_time,
        }
        for step in range(1, 21)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 21, "da')


def ids(result: dict[str, Any]) -> set[str]:
    return {finding["id"] for finding in result["findings"]}


def test_healthy_run(run: Path) -> None:
    metrics(run, 0.0001, 0.1)
    before = (run / "run.yaml").read_bytes()
    code, result = doctor(run, "--seconds", 2)
    assert (code, result["verdict"], ids(result)) == (0, "good", {"data.keeps-up"})
    assert result["steps"]["steps"] == 17
    assert result["steps"]["waits"] == pytest.approx(0.0001 / 0.1001)
    assert result["statistics"]["eod_share"] > 0
    assert result["statistics"]["text"].startswith(help_texts()[0][:20])
    times = [timing["seconds_per_batch"] for timing in result["pipeline"]]
    assert times == sorted(times)
    assert all(0 < seconds < 1 for seconds in times)
    assert (run / "run.yaml").read_bytes() == before
    assert not (run / "output").exists()


@pytest.mark.parametrize(
    ("pipeline", "gain", "cause", "remedy"),
    [
        (0.004, 1.0, "competes with the model for cores", "none of the settings tried is faster"),
        (0.2, 2.0, "takes longer for a batch than the model", "2.00 times as fast"),
    ],
)
def test_model_that_waits(pipeline: float, gain: float, cause: str, remedy: str) -> None:
    from mindferry.cli.doctor_data import _waiting

    now = Timing(Settings(1, 2), pipeline, 100)
    best = Timing(Settings(2, 4), pipeline / gain, 100)
    (finding,) = _waiting(StepTimes(17, 0.3, 0.1, 0.4), now, best)
    assert (finding.id, finding.severity) == ("data.waits", "problem")
    assert "(75.0%)" in finding.message
    assert cause in finding.cause
    assert remedy in finding.remedy
    (finding,) = _waiting(StepTimes(17, 0.004, 0.1, 0.104), now, best)
    assert (finding.id, finding.severity) == ("data.keeps-up", "info")


def test_without_training_and_with_settings_to_write(run: Path) -> None:
    """A prefetch of 1 with one worker is slower or equal; whatever wins is a setting that was measured."""
    (run / "metrics.jsonl").unlink(missing_ok=True)
    text = (run / "run.yaml").read_text()
    code, result = doctor(run, "--seconds", 4, "--write")
    assert code == 0
    assert "data.no-steps" in ids(result)
    after = (run / "run.yaml").read_text()
    best = result["pipeline"][0]
    if result["written"]:
        assert f"num_parallel_workers: {best['num_parallel_workers']}\n" in after
        changed = [
            pair for pair in zip(text.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]
        ]
        assert all(old.split(":")[0] == new.split(":")[0] for old, new in changed)
        assert len(changed) <= 2
    else:
        assert after == text
    (run / "run.yaml").write_text(text)


def test_write_keeps_the_file(run: Path, tmp_path: Path) -> None:
    from mindferry.cli.doctor_data import _write
    from mindferry.targets import run_yaml

    path = tmp_path / "run.yaml"
    path.write_bytes((run / "run.yaml").read_bytes())
    before = path.read_text().splitlines()
    _write(path, Settings(num_parallel_workers=7, prefetch_size=9))
    after = path.read_text().splitlines()
    changed = {(old.strip(), new.strip()) for old, new in zip(before, after, strict=True) if old != new}
    assert changed == {
        ("num_parallel_workers: 1", "num_parallel_workers: 7"),
        ("prefetch_size: 2", "prefetch_size: 9"),
    }
    assert run_yaml.read(path)["train_dataset"]["num_parallel_workers"] == 7


def test_data_that_does_not_fit_the_run(run: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "run"
    shutil.copytree(run, broken)
    text = (broken / "run.yaml").read_text()
    (broken / "run.yaml").write_text(text.replace("seq_length: 64", "seq_length: 32"))
    code, result = doctor(broken)
    assert code == 2
    assert "expected [32]" in result["findings"][0]["message"]
    (broken / "run.yaml").write_text(text.replace("vocab_size: 600", "vocab_size: 300"))
    code, result = doctor(broken, "--seconds", 1)
    assert code == 1
    assert "data.token-range" in ids(result)
    (broken / "run.yaml").write_text(text)
    (broken / "data/train.mindrecord.db").unlink()
    code, result = doctor(broken)
    assert code == 2
    assert "train.mindrecord.db: missing" in result["findings"][0]["message"]


def test_bare_doctor_looks_at_the_data(run: Path, tmp_path: Path) -> None:
    """Without timing settings: files, tokens, waiting; what cannot be read is a finding among the others."""
    import shutil

    from mindferry.cli.doctor import _data

    other = Path(shutil.copytree(run, tmp_path / "run"))
    (other / "metrics.jsonl").unlink(missing_ok=True)
    findings, text = _data(other)
    assert findings == []
    assert "tokens looked at" in text
    metrics(other, 1.0, 3.0)
    findings, text = _data(other)
    assert [(item.id, item.severity) for item in findings] == [("data.waits", "problem")]
    assert "a step waits 25.0% of its time" in text
    (other / "data/train.mindrecord.db").unlink()
    findings, text = _data(other)
    assert [(item.id, item.severity) for item in findings] == [("mindrecord.no-index", "problem")]
    assert "train.mindrecord.db: missing" in findings[0].message


def test_step_times(tmp_path: Path) -> None:
    assert step_times(tmp_path / "none.jsonl") is None
    metrics(tmp_path, 1.0, 3.0)
    found = step_times(tmp_path / "metrics.jsonl")
    assert found == StepTimes(17, 1.0, 3.0, 4.0)
    assert found.waits == 0.25
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnull\n[]\n{"step": "x", "data_time": "nan"}\n')
    assert step_times(tmp_path / "metrics.jsonl") is None


def test_candidates_stay_within_the_cores() -> None:
    assert candidates(Settings(1, 2), cores=1) == [Settings(1, 2), Settings(1, 4)]
    assert {each.num_parallel_workers for each in candidates(Settings(1, 2), cores=16)} == {1, 2, 8, 16}


def test_more_workers_than_cores_is_one_line(run: Path) -> None:
    section = {
        "data_loader": {"type": "MindDataset", "dataset_files": [str(run / "data/train.mindrecord")]},
        "input_columns": ["input_ids"],
        "drop_remainder": True,
        "repeat": 1,
        "seed": 0,
        "python_multiprocessing": False,
    }
    with pytest.raises(MindferryError, match="num_parallel_workers exceeds the boundary") as caught:
        measure(section, 4, Settings((os.cpu_count() or 1) + 1, 2), 0.1)
    assert "\n" not in str(caught.value)
    with pytest.raises(MindferryError, match="gives no batch of 100000 sequences"):
        measure(section, 100_000, Settings(1, 2), 0.1)
    assert np.isfinite(measure(section, 4, Settings(1, 2), 0.1).seconds_per_batch)


def test_settings_change_neither_content_nor_order(run: Path) -> None:
    """Shuffled with the run's seed, two epochs: every setting that may be written gives the same batches."""
    section = {
        "data_loader": {
            "type": "MindDataset",
            "dataset_files": [str(run / "data/train.mindrecord")],
            "shuffle": True,
        },
        "input_columns": ["input_ids", "labels"],
        "drop_remainder": True,
        "repeat": 1,
        "seed": 42,
        "python_multiprocessing": False,
    }

    def batches(settings: Settings) -> np.ndarray:
        dataset = build_pipeline(section, 4, settings)
        iterator = dataset.create_tuple_iterator(num_epochs=2, output_numpy=True)
        return np.stack([batch[0] for _ in range(2) for batch in iterator])

    expected = batches(Settings(1, 2))
    half = len(expected) // 2
    assert not np.array_equal(expected[:half], expected[half:])  # each epoch in an order of its own
    for settings in candidates(Settings(1, 2)):
        np.testing.assert_array_equal(batches(settings), expected)
