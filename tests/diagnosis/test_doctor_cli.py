"""The commands as a person or a script meets them: exit codes, --json, stdin, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LOGS = Path(__file__).parent / "logs"


def doctor(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    env = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "mindferry", "doctor", *words],
        input=stdin,
        capture_output=True,
        timeout=300,
        env=env,
    )


def as_json(done: subprocess.CompletedProcess) -> dict:
    answer = json.loads(done.stdout)
    assert {"command", "version", "verdict", "findings"} <= set(answer)
    for item in answer["findings"]:
        assert set(item) == {"id", "severity", "message", "cause", "remedy", "evidence"}
        assert item["severity"] in ("info", "warning", "problem")
    return answer


def test_startup_json() -> None:
    done = doctor("startup", str(LOGS / "one_rank_shape"), "--json")
    answer = as_json(done)
    assert done.returncode == 1
    assert (answer["command"], answer["verdict"]) == ("doctor startup", "problem")
    assert answer["findings"][0]["id"] == "startup.shape.matmul"
    assert "rank 1" in answer["findings"][0]["message"]
    assert sorted(answer["checked"]) == ["msrun.log", "scheduler.log", "worker_0.log", "worker_1.log"]


def test_startup_for_a_person_and_from_stdin() -> None:
    done = doctor("startup", "-", stdin=(LOGS / "morph_pynative.log").read_bytes())
    assert done.returncode == 1
    assert b"Morph is only supported in GRAPH_MODE" in done.stdout
    assert b"context.mode: 0" in done.stderr


def test_startup_healthy_log() -> None:
    done = doctor("startup", str(LOGS / "healthy.log"), "--json")
    assert (done.returncode, as_json(done)["verdict"]) == (0, "good")


@pytest.mark.parametrize(
    "words", [["startup", "/nonexistent"], ["loss", "/nonexistent"], ["env", "--for", "torch==2"]]
)
def test_wrong_use_is_one_line_and_exit_2(words: list[str]) -> None:
    done = doctor(*words, "--json")
    answer = as_json(done)
    assert (done.returncode, answer["verdict"]) == (2, "error")
    assert "\n" not in answer["findings"][0]["message"]
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("words", [[], ["env"], ["startup"], ["loss"]])
def test_help_has_an_example(words: list[str]) -> None:
    done = doctor(*words, "--help")
    assert done.returncode == 0
    assert b"Example: mindferry doctor" in done.stdout


def test_env_json() -> None:
    done = doctor("env", "--for", "mindformers==1.3.2", "--quick", "--json")
    answer = as_json(done)
    assert done.returncode == 1
    found = {item["id"]: item for item in answer["findings"]}
    assert "mindspore 2.4.10 is not on PyPI" in found["env.target-not-installable"]["message"]
    assert len(answer["checked"]) >= 12


def test_loss_json_stops_at_the_first_culprit(tmp_path: Path) -> None:
    from .faults import FAULTS, make

    root = make(tmp_path / "run", 0, FAULTS["shifted_labels"][1], train=False)
    done = doctor("loss", str(root), "--json")
    answer = as_json(done)
    assert (done.returncode, answer["culprit"]) == (1, "data")
    assert [step["name"] for step in answer["steps"]] == ["data"]
    assert not (root / "logs").exists()
