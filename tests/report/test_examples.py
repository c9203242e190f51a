"""The examples in --help of the commands that compare, run as printed."""

from __future__ import annotations

import importlib
import json
import shlex

import pytest

from tests.report.runs import losses, write_run
from tests.support import run_cli


@pytest.mark.parametrize("name", ["compare", "report"])
def test_example(tmp_path, name):
    write_run(tmp_path / "run")
    write_run(tmp_path / "earlier-run", seconds=0.2)
    history = [{"step": step, "loss": loss} for step, loss in enumerate(losses(300, 0.002, 0), start=1)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    example = importlib.import_module(f"mindferry.cli.{name}").EXAMPLE
    program, *words = shlex.split(example.removeprefix("Example: "))
    assert program == "mindferry"
    done = run_cli(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/report.html").exists() == (name == "report")
