"""How a job of several processes ends: on request, by a fault, by a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from mindferry.errors import MindferryError
from mindferry.launching.msrun import Job
from mindferry.targets.run_directory import RunDirectory
from mindferry.training import checkpoints, engine

from .test_data_parallel import metrics, single, smooth, untrained  # noqa: F401

WORKER = "mindferry/training/worker.py"


def ranks(run: Path) -> list[psutil.Process]:
    """Whatever still runs of the job of `run`: scheduler, ranks and msrun."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(WORKER in word for word in words) and any(str(run) in word for word in words):
            found.append(process)
    return found


def gone(run: Path, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not ranks(run):
            return True
        time.sleep(0.1)
    return False


def started(run: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mindferry", "train", str(run), "--workers", "2", "--json", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and len(
            (run / "metrics.jsonl").read_bytes().splitlines()
        ) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(
        f"no {count} steps: {process.communicate(timeout=60) if process.poll() is not None else ''}"
    )


def pid(run: Path, rank: int) -> int:
    return int((run / f"logs/workers/rank-{rank}.pid").read_text())


def test_ctrl_c_stops_all_after_one_and_the_same_step(single: Path, tmp_path: Path) -> None:  # noqa: F811
    run = untrained(single, tmp_path / "run")
    process = started(run)
    wait_for_steps(run, 5, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    answer = json.loads(out)
    assert process.returncode == 128 + signal.SIGINT
    assert answer["stopped"] == "interrupted"
    last = answer["steps"][1]
    assert Path(answer["checkpoint"]).name == f"step-{last:08d}"
    assert len((run / "logs/metrics.rank_1.jsonl").read_text().splitlines()) == last
    assert gone(run)
    engine.train(RunDirectory.open(run), engine.Options(steps=last + 5, resume=True))
    assert [r["loss"] for r in metrics(run)] == pytest.approx(
        [r["loss"] for r in metrics(single)[: last + 5]], rel=1e-5
    )


def often_saved(single: Path, out: Path) -> Path:  # noqa: F811
    """A run that writes a checkpoint every two steps."""
    run = untrained(single, out)
    content = yaml.safe_load((run / "run.yaml").read_text())
    for callback in content["callbacks"]:
        if callback["type"] == "CheckpointMonitor":
            callback["save_checkpoint_steps"] = 2
    (run / "run.yaml").write_text(yaml.safe_dump(content))
    return run


def kill_one(run: Path, rank: int, steps: int) -> None:
    """Kill `rank` about `steps` steps after the newest checkpoint; what is left must be whole."""
    before = checkpoints.newest(run / "checkpoints")[0]
    after = (before.step if before else 0) + steps
    process = started(run, *(["--resume"] if before else []))
    wait_for_steps(run, after, process)
    time.sleep(random.random() * 0.05)  # some two steps
    os.kill(pid(run, rank), signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    answer = json.loads(out)
    assert process.returncode == 1, "neither good nor a wrong command"
    assert answer["findings"][0]["id"] == "launch.rank-died"
    assert answer["findings"][0]["message"].startswith(f"rank {rank} of 2 ")
    assert gone(run), "no process is left over"
    found, skipped = checkpoints.newest(run / "checkpoints")
    assert not skipped, "no checkpoint is torn"
    assert found is not None
    assert found.step > after - 4


def test_a_killed_rank_ends_the_job_and_the_checkpoint_stays(single: Path, tmp_path: Path) -> None:  # noqa: F811
    run = often_saved(single, tmp_path / "run")
    kill_one(run, 1, 6)
    found = checkpoints.newest(run / "checkpoints")[0]
    assert found is not None
    engine.train(RunDirectory.open(run), engine.Options(steps=found.step + 3, resume=True))
    assert [r["loss"] for r in metrics(run)] == pytest.approx(
        [r["loss"] for r in metrics(single)[: found.step + 3]], rel=1e-5
    )


@pytest.mark.long
def test_ten_kills_lose_nothing(single: Path, tmp_path: Path) -> None:  # noqa: F811
    """Every other time rank 0, which writes the checkpoints, one every two steps."""
    run = often_saved(single, tmp_path / "run")
    for number in range(10):
        kill_one(run, number % 2, 3)
    engine.train(RunDirectory.open(run), engine.Options(steps=50, resume=True))
    assert [r["loss"] for r in metrics(run)] == pytest.approx(
        [r["loss"] for r in metrics(single)[:50]], rel=1e-5
    )


def test_kill_9_of_the_command_takes_all_along(single: Path, tmp_path: Path) -> None:  # noqa: F811
    run = untrained(single, tmp_path / "run")
    process = started(run)
    wait_for_steps(run, 2, process)
    assert len(ranks(run)) >= 3
    process.kill()
    process.communicate()
    assert gone(run)


def test_a_rank_that_fails_is_heard(tmp_path: Path) -> None:
    """Its own error, though the other rank waits for it, and only sees it gone."""
    script = tmp_path / "script.py"
    script.write_text(
        "from mindferry.launching.rank import main\n"
        "def work(folder, request, rank):\n"
        "    import mindspore as ms\n"
        "    from mindspore import ops\n"
        "    from mindspore.communication import init\n"
        "    ms.set_device('CPU')\n"
        "    init()\n"
        "    if rank == 1:\n"
        "        raise ValueError(f'shard {request[\"shard\"]} is broken')\n"
        "    return {'sum': ops.AllReduce()(ms.Tensor([1.0])).asnumpy().tolist()}\n"
        "main(work)\n"
    )
    with pytest.raises(MindferryError, match="rank 1 of 2: ValueError: shard 7 is broken") as caught:
        Job(script, tmp_path / "job", 2).run({"shard": 7})
    assert "worker_1.log" in caught.value.evidence
    assert gone(script)


def test_results_come_back_by_rank(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mindferry.launching.rank import main\n"
        "def work(folder, request, rank):\n"
        "    import mindspore as ms\n"
        "    from mindspore import ops\n"
        "    from mindspore.communication import init\n"
        "    ms.set_device('CPU')\n"
        "    init()\n"
        "    return {'sum': ops.AllReduce()(ms.Tensor([float(rank + 1)])).asnumpy().tolist(), 'rank': rank}\n"
        "main(work)\n"
    )
    polled = []
    found = Job(script, tmp_path / "job", 3, lambda: polled.append(1)).run({})
    assert [item["rank"] for item in found] == [0, 1, 2]
    assert all(item["sum"] == [6.0] for item in found)
    assert polled
