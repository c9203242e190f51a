"""train: mindformers' own Trainer, its metrics, its modes, interruption and resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from mindferry.errors import UsageError
from mindferry.targets.run_directory import RunDirectory
from mindferry.training import checkpoints
from mindferry.training.engine import Options, train

from ..support import make_run, make_source, run_cli

FIELDS = (
    *("step", "loss", "lr", "grad_norm", "loss_scale"),
    *("data_time", "compute_time", "step_time", "tokens_per_second", "peak_memory_bytes"),
)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in metrics(run)]


def test_the_command_trains_and_the_loss_falls(run: Path) -> None:
    done = run_cli("train", run, "--steps", "40", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    records = metrics(run)
    assert [record["step"] for record in records] == list(range(1, 41))
    assert all(field in records[0] for field in FIELDS)
    assert sum(losses(run)[-5:]) < sum(losses(run)[:5])
    # no warm-up: the first update runs at the full rate, then it falls linearly to 0 at step 60
    assert records[0]["lr"] == pytest.approx(1e-3)
    assert records[30]["lr"] == pytest.approx(0.5e-3, rel=1e-5)
    for record in records:
        assert record["step_time"] >= record["compute_time"] > 0
        assert record["tokens_per_second"] == pytest.approx(4 * 32 / record["step_time"])
        assert record["peak_memory_bytes"] > 1e8
    assert Path(answer["checkpoint"]).name == "step-00000040"
    assert sorted(p.name for p in run.parent.iterdir()) == ["run"], "nothing is left beside the run"


def test_graph_and_pynative_give_the_same_losses(source: Path, corpus: Path, tmp_path: Path) -> None:
    runs = {}
    for mode in ("graph", "pynative"):
        runs[mode] = make_run(source, corpus, tmp_path / mode)
        overrides = {
            f"model.model_config.{part}_dropout": 0.0 for part in ("embedding", "hidden", "attention")
        }
        train(RunDirectory.open(runs[mode]), Options(steps=20, mode=mode, overrides=overrides))
    pairs = list(zip(losses(runs["graph"]), losses(runs["pynative"]), strict=True))
    assert len(pairs) == 20
    assert max(abs(a - b) for a, b in pairs) <= 1e-5


def test_resumed_losses_are_those_of_an_unbroken_run(corpus: Path, tmp_path: Path) -> None:
    """Across epoch boundaries, with shuffled data."""
    source = make_source(tmp_path / "gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    whole = make_run(source, corpus, tmp_path / "whole", batch_size=96)
    broken = make_run(source, corpus, tmp_path / "broken", batch_size=96)
    train(RunDirectory.open(whole), Options(steps=16))
    epoch = json.loads((whole / "checkpoints/step-00000016/state.json").read_text())["steps_per_epoch"]
    assert 2 < epoch < 8, "the test must cross two epochs"
    train(RunDirectory.open(broken), Options(steps=epoch - 1))
    train(RunDirectory.open(broken), Options(steps=16, resume=True))
    assert losses(broken) == losses(whole)


def test_resumed_with_other_pipeline_settings_the_next_batch_is_the_same(
    source: Path, corpus: Path, tmp_path: Path
) -> None:
    """Every batch from the resumed step on, over the ends of epochs, for more workers and deeper queues."""
    (tmp_path / "text.txt").write_text(
        (corpus / "0.txt").read_text(encoding="utf-8")[:1500], encoding="utf-8"
    )
    run = make_run(source, tmp_path / "text.txt", tmp_path / "run")
    seen: dict[int, list] = {}

    def keep(step: int, batch: tuple) -> None:
        seen[step] = [column.asnumpy().copy() for column in batch]

    train(RunDirectory.open(run), Options(mode="pynative", steps=12, on_batch=keep))
    whole = dict(seen)
    state = json.loads((run / "checkpoints/step-00000012/state.json").read_text())
    epoch = state["steps_per_epoch"]
    assert 2 < epoch < 8
    assert not np.array_equal(whole[1][0], whole[1 + epoch][0]), "shuffled anew in every epoch"
    train(RunDirectory.open(run), Options(mode="pynative", steps=epoch - 1, restart=True))
    for workers, prefetch, processes in ((2, 8, False), (1, 1, True)):
        broken = Path(shutil.copytree(run, tmp_path / f"broken-{workers}"))
        settings = {
            "train_dataset.num_parallel_workers": min(workers, os.cpu_count() or 1),
            "train_dataset.prefetch_size": prefetch,
            "train_dataset.python_multiprocessing": processes,
        }
        seen.clear()
        train(
            RunDirectory.open(broken),
            Options(mode="pynative", steps=12, resume=True, overrides=settings, on_batch=keep),
        )
        assert sorted(seen) == list(range(epoch, 13))
        for step, batch in seen.items():
            for column, expected in zip(batch, whole[step], strict=True):
                np.testing.assert_array_equal(column, expected)


def test_training_twice_needs_a_decision(run: Path) -> None:
    directory = RunDirectory.open(run)
    train(directory, Options(steps=2))
    with pytest.raises(UsageError, match="already trained to step 2"):
        train(directory, Options(steps=4))
    with pytest.raises(UsageError, match="already at step 2 of 2"):
        train(directory, Options(steps=2, resume=True))
    train(directory, Options(steps=3, restart=True))
    assert [record["step"] for record in metrics(run)] == [1, 2, 3]


def test_a_torn_checkpoint_is_passed_over(run: Path) -> None:
    directory = RunDirectory.open(run)
    train(directory, Options(steps=2))
    train(directory, Options(steps=4, resume=True))
    newest = directory.checkpoints / "step-00000004"
    os.truncate(newest / checkpoints.OPTIMIZER, 100)
    found, skipped = checkpoints.newest(directory.checkpoints)
    assert found is not None
    assert found.step == 2
    assert "optimizer.safetensors has 100 bytes" in skipped[0]


def start(run: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mindferry", "train", str(run), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(run: Path, process: subprocess.Popen[str], steps: int) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        path = run / "metrics.jsonl"
        if path.exists() and path.read_text(encoding="utf-8").count("\n") >= steps:
            return
        time.sleep(0.05)
    pytest.fail(f"no {steps} steps: {process.communicate()[1]}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_saves_and_resume_goes_on(run: Path, number: signal.Signals, code: int) -> None:
    process = start(run)
    wait_for_steps(run, process, 3)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    assert not [child for child in children if child.is_running()], "no child process stays"
    done = len(metrics(run))
    found, skipped = checkpoints.newest(run / "checkpoints")
    assert found is not None
    assert found.step == done
    assert not skipped
    assert "--resume" in stderr
    train(RunDirectory.open(run), Options(steps=done + 2, resume=True))
    assert [record["step"] for record in metrics(run)] == list(range(1, done + 3))


def test_the_second_signal_ends_at_once(run: Path) -> None:
    process = start(run)
    wait_for_steps(run, process, 2)
    # Stopped, the process cannot act between the two.
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode in (130, 143)
    assert not list((run / "checkpoints").glob("step-*")), "nothing was saved: the second signal was obeyed"


def test_kill_9_loses_only_what_came_after_the_last_checkpoint(run: Path) -> None:
    text = (run / "run.yaml").read_text(encoding="utf-8")
    (run / "run.yaml").write_text(
        text.replace("save_checkpoint_steps: 60", "save_checkpoint_steps: 2"), encoding="utf-8"
    )
    process = start(run)
    wait_for_steps(run, process, 5)
    process.kill()
    process.communicate()
    found, _ = checkpoints.newest(run / "checkpoints")
    assert found is not None
    train(RunDirectory.open(run), Options(steps=found.step + 2, resume=True))
    assert [record["step"] for record in metrics(run)] == list(range(1, found.step + 3))


def test_the_reference_layers_are_refused_on_a_cpu(run: Path) -> None:
    text = (run / "run.yaml").read_text(encoding="utf-8")
    (run / "run.yaml").write_text(
        text.replace("layer_spec: portable", "layer_spec: reference"), encoding="utf-8"
    )
    done = run_cli("train", run)
    assert done.returncode == 2
    assert "layer_spec" in done.stderr
    assert "Ascend" in done.stderr


def test_a_changed_model_is_caught_before_the_first_step(run: Path) -> None:
    """mindformers would only log it, and train from random values."""
    text = (run / "run.yaml").read_text(encoding="utf-8")
    (run / "run.yaml").write_text(
        text.replace("ffn_hidden_size: 192", "ffn_hidden_size: 96"), encoding="utf-8"
    )
    done = run_cli("train", run)
    assert done.returncode == 1
    assert "linear_fc1.weight" in done.stderr
    assert not (run / "checkpoints").exists()


@pytest.mark.parametrize("arguments", [("--mode", "grph"), ("--resume", "--restart"), ("--device", "gpu")])
def test_wrong_use(run: Path, arguments: tuple[str, ...]) -> None:
    done = run_cli("train", run, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_resume_with_nothing_to_resume(run: Path) -> None:
    done = run_cli("train", run, "--resume")
    assert done.returncode == 2
    assert "no complete checkpoint" in done.stderr


def test_a_directory_that_is_no_run(tmp_path: Path) -> None:
    done = run_cli("train", tmp_path)
    assert done.returncode == 2
    assert "run.yaml" in done.stderr


def test_a_failure_inside_the_engine_is_explained(run: Path) -> None:
    """What fails deep inside mindformers comes with the cause and remedy that the doctor knows."""
    text = (run / "run.yaml").read_text(encoding="utf-8")
    broken = text.replace("  - position_ids\n", "  - positions\n")
    assert broken != text
    (run / "run.yaml").write_text(broken, encoding="utf-8")
    done = run_cli("train", run, "--json")
    assert done.returncode == 1
    finding = json.loads(done.stdout)["findings"][0]
    assert "positions" in finding["message"] + finding["evidence"]
    assert finding["id"] != "train.failed", "the knowledge base has an entry for a wrong column"
    assert finding["cause"]
    assert "train.log" in finding["remedy"]


def test_a_directory_of_data_trains_as_its_files_do(run: Path) -> None:
    """dataset_dir is mindformers' other way to name the data; every part of mindferry must find the same files."""
    directory = RunDirectory.open(run)
    train(directory, Options(steps=2))
    by_file = losses(run)
    text = (run / "run.yaml").read_text(encoding="utf-8")
    named = "    dataset_files:\n    - ./data/train.mindrecord\n"
    assert named in text
    (run / "run.yaml").write_text(text.replace(named, "    dataset_dir: ./data\n"), encoding="utf-8")
    train(directory, Options(steps=2, restart=True))
    assert losses(run) == by_file
