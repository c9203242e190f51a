"""The command line: fast to start, helpful, and its examples are true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mindferry.cli import COMMANDS, spread

from ..support import run_cli


def test_help_is_fast() -> None:
    """Under half a second of processor time; the clock would also count what other processes use."""
    used = []
    for _ in range(3):
        before = os.times()
        assert run_cli("--help").returncode == 0
        after = os.times()
        used.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    assert min(used) < 0.5


def test_importing_mindferry_imports_nothing_heavy() -> None:
    code = (
        "import sys, mindferry, mindferry.cli, mindferry.spec; "
        "print([m for m in ('mindspore','mindformers','torch','transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Every command, in an order in which each finds what those before it made; what a test changes of its example, for
# time; and whether finding a problem (exit 1) is an answer too.
ROAD: list[tuple[str, list[str], bool]] = [
    ("map", [], False),
    ("migrate", ["--steps", "4"], False),
    ("verify", ["--training-steps", "2"], False),
    ("train", [], False),
    ("export", [], False),
    ("reshard", [], False),
    ("rehearse", ["--strategy", "mp=2", "--steps", "1"], False),
    ("launch", ["--hosts", "10.0.0.1", "--devices-per-host", "1"], True),
    ("doctor comm", ["--workers", "2", "--steps", "6"], True),
    ("data build", [], False),
    ("data show", [], False),
    ("plan", [], False),
    ("doctor env", ["--no-smoke"], True),
    ("doctor startup", [], True),
    ("doctor data", ["--seconds", "1"], True),
]


def test_the_road_knows_every_command() -> None:
    assert {words.split()[0] for words, _, _ in ROAD} >= set(COMMANDS) - {
        "report",
        "bench",
        "tune",
        "compare",
    }


def test_every_helps_example_runs(source: Path, corpus: Path, tmp_path: Path) -> None:
    """As printed, in a directory where its paths exist; only lengths are made small."""
    (tmp_path / "gpt2").symlink_to(source)
    (tmp_path / "corpus").symlink_to(corpus)
    for words, extra, may_find in ROAD:
        shown = run_cli(*words.split(), "--help", env={**os.environ, "COLUMNS": "250"}).stdout
        example = re.search(rf"Example: mindferry ({words}.*)", shown)
        assert example is not None, words
        arguments = shlex.split(example.group(1).replace("--seq-length 1024", "--seq-length 32"))
        done = run_cli(*arguments, *extra, cwd=tmp_path)
        assert done.returncode in ((0, 1) if may_find else (0,)), f"{words}: {done.stderr}"
        assert "Traceback" not in done.stderr


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
