"""The command line: fast to start, helpful, and its examples are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mindferry.cli import COMMANDS, spread

from ..support import run_cli


def test_help_is_fast() -> None:
    """Under half a second; the best of three, as the machine may be busy."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        assert run_cli("--help").returncode == 0
        times.append(time.perf_counter() - began)
    assert min(times) < 0.5


def test_importing_mindferry_imports_nothing_heavy() -> None:
    code = (
        "import sys, mindferry, mindferry.cli, mindferry.spec; "
        "print([m for m in ('mindspore','mindformers','torch','transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "doctor"])
def test_every_help_has_an_example(name: str) -> None:
    shown = run_cli(name, "--help", env={**os.environ, "COLUMNS": "200"})
    assert shown.returncode == 0
    assert f"Example: mindferry {name}" in shown.stdout


def test_the_examples_of_the_first_road_run(source: Path, corpus: Path, tmp_path: Path) -> None:
    """Each --help's example, as printed, in a directory where its paths exist."""
    (tmp_path / "gpt2").symlink_to(source)
    (tmp_path / "corpus").symlink_to(corpus)
    for name in ("migrate", "verify", "train"):
        shown = run_cli(name, "--help", env={**os.environ, "COLUMNS": "200"}).stdout
        example = re.search(r"Example: mindferry (.*)", shown)
        assert example is not None
        arguments = [re.sub(r"^1024$", "32", word) for word in shlex.split(example.group(1))]
        if name == "migrate":
            arguments += ["--steps", "4"]
        if name == "verify":
            arguments += ["--training-steps", "2"]
        done = run_cli(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (
            ["migrate", "src", "--data", "a", "b", "--out", "r"],
            ["migrate", "src", "--data", "a", "--data", "b", "--out", "r"],
        ),
        (["migrate", "--data", "a", "--data", "b"], ["migrate", "--data", "a", "--data", "b"]),
        (["train", "run"], ["train", "run"]),
    ],
)
def test_data_takes_several_values(given: list[str], meant: list[str]) -> None:
    assert spread(given) == meant


def test_errors_in_json_mode_are_json(tmp_path: Path) -> None:
    done = run_cli("train", tmp_path / "nothing", "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert answer["verdict"] == "error"
    assert "nothing" in answer["findings"][0]["message"]
    assert answer["findings"][0]["remedy"]


def test_control_characters_of_file_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    done = run_cli("train", tmp_path / "\x1b[31mred")
    assert "\x1b" not in done.stderr
    assert "\\x1b" in done.stderr


def test_a_terminal_sees_the_bar_and_not_the_libraries(run: Path) -> None:
    """On a terminal: a progress bar and the result; what MindSpore and mindformers log is in the log file."""
    import pty

    seen = bytearray()

    def read(fd: int) -> bytes:
        data = os.read(fd, 4096)
        seen.extend(data)
        return data

    status = pty.spawn([sys.executable, "-m", "mindferry", "train", str(run), "--steps", "3"], read)
    text = seen.decode("utf-8", "replace")
    assert os.waitstatus_to_exitcode(status) == 0, text
    assert "3/3 steps" in text
    assert "steps 1 to 3: loss" in text
    assert "INFO" not in text
    assert "INFO" in (run / "logs" / "train.log").read_text(encoding="utf-8")
