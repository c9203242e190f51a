"""What is broken, missing or not comparable: said by every command that compares, and a page still comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindferry.report import collect, layers, page
from tests.report.runs import write_run
from tests.support import run_cli


def change(path: Path, section: str, **values) -> None:
    content = json.loads((path / "migration.json").read_text())
    content[section].update(values)
    (path / "migration.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A run, one of another model, and one of other data."""
    root = tmp_path_factory.mktemp("others")
    for name in ("run", "model", "data"):
        write_run(root / name)
    change(root / "model", "model", hidden_size=96)
    change(root / "data", "data", tokens=999)
    return root


@pytest.mark.parametrize(("other", "said"), [("model", "model: hidden_size"), ("data", "data: tokens")])
@pytest.mark.parametrize("command", ["compare", "report", "bench"])
def test_other_models_and_data_are_refused(others, command, other, said):
    arguments = {
        "compare": (others / other, others / "run"),
        "report": (others / "run", others / other),
        "bench": (others / "run", "--baseline", others / other),
    }[command]
    done = run_cli(command, *arguments, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 2
    assert answer["findings"][0]["id"] == "compare.different"
    assert said in answer["findings"][0]["message"]
    assert "--force" in answer["findings"][0]["remedy"]


def test_forced_all_the_same(others):
    done = run_cli("compare", others / "model", others / "run", "--force", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["convergence"] == "same"
    assert [f["id"] for f in answer["findings"] if "hidden_size" in f["message"]] == ["compare.different"]
    done = run_cli("report", others / "run", others / "data", "--force")
    assert done.returncode == 0, done.stderr
    text = (others / "run/report.html").read_text()
    assert "These runs are not of the same model or data" in text
    assert "data: tokens" in text


def damaged(run: Path, damage: str) -> Path:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if damage == "broken last line":
        path.write_text("".join(lines) + '{"step": 301, "los')
    elif damage == "missing steps":
        path.write_text("".join(lines[:100] + lines[120:]))
    elif damage == "NaN losses":
        rows = [json.loads(line) for line in lines]
        path.write_text(
            "".join(json.dumps({**r, "loss": "nan"} if r["step"] > 250 else r) + "\n" for r in rows)
        )
    elif damage == "empty":
        path.write_text("")
    elif damage == "never trained":
        path.unlink()
    elif damage == "no text at all":
        path.write_bytes(bytes(range(256)) * 40)
    return run


CASES = [
    ("broken last line", "1 broken lines left out", "same", 0),
    ("missing steps", "20 steps between 1 and 300 are missing", "same", 0),
    ("NaN losses", "50 of 300 steps have no finite loss", "diverged", 1),
    ("empty", "no training step in it", "undecided", 1),
    ("never trained", "not trained yet", "undecided", 1),
    ("no text at all", "no training step in it", "undecided", 1),
]


@pytest.mark.parametrize(("damage", "note", "verdict", "code"), CASES, ids=[case[0] for case in CASES])
def test_damaged_metrics(tmp_path, damage, note, verdict, code):
    """`compare` says what is wrong beside its verdict; `report` makes its page, alone and beside a whole run."""
    whole, run = write_run(tmp_path / "whole"), damaged(write_run(tmp_path / "run"), damage)
    done = run_cli("compare", whole, run, "--json")
    answer = json.loads(done.stdout)
    assert (answer["convergence"], done.returncode) == (verdict, code), answer
    assert any(note in finding["message"] for finding in answer["findings"])
    if verdict == "diverged":
        assert answer["parted_at"] == 251
    done = run_cli("report", run, whole)
    assert done.returncode == 0, done.stderr
    assert note in (run / "report.html").read_text()
    assert note in done.stderr + done.stdout
    assert note in page.render(collect.gather(run), [], [])


def test_a_reference_without_numbers_is_no_reference(tmp_path):
    """NaN in the reference: those steps are left out, and too few left are undecided rather than the same."""
    reference, run = damaged(write_run(tmp_path / "reference"), "NaN losses"), write_run(tmp_path / "run")
    answer = json.loads(run_cli("compare", reference, run, "--json").stdout)
    assert (answer["convergence"], answer["points"]) == ("same", 250)
    path = reference / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[248:]))
    answer = json.loads(run_cli("compare", reference, run, "--json").stdout)
    assert (answer["convergence"], answer["points"]) == ("undecided", 2)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
numbers = st.floats() | st.integers() | st.none() | st.text(max_size=4)
names = ("flops", "intensity", "bound", "roof_flops_per_second", "share_of_roof", "achieved_flops_per_second")
roofs = st.fixed_dictionaries({}, optional=dict.fromkeys(names, numbers))
rows = st.fixed_dictionaries(
    {},
    optional={
        "name": values,
        "forward_seconds": numbers,
        "both_seconds": numbers,
        "roofline": roofs | values,
    },
)
benches = st.fixed_dictionaries(
    {}, optional={"layers": st.lists(rows, max_size=4) | values, "gemm_flops_per_second": numbers,
                  "memory_bytes_per_second": numbers, "rows": values, "ratios": values, "memory_parts": values,
                  "operators": st.fixed_dictionaries({}, optional={"by_type": st.lists(values, max_size=3) | values,
                                                                   "by_place": values, "between_seconds": numbers})
                  | values}
)  # fmt: skip


@given(benches)
@settings(max_examples=40, deadline=None)
def test_any_bench_json_gives_a_page(tmp_path_factory, content):
    subject = collect.Subject("x", Path("x"), collect.Curve("x", "metrics.jsonl"), bench=content)
    text = page.render(subject, [], [])
    assert text.rstrip().endswith("</html>")


def test_numbers_of_no_machine():
    roof = {
        "flops": 1e9,
        "intensity": 1.7e308,
        "roof_flops_per_second": 1e-300,
        "achieved_flops_per_second": 5e-324,
    }
    row = {"name": "a", "forward_seconds": 1e-3, "both_seconds": 2e-3, "roofline": roof}
    content = {"layers": [row], "gemm_flops_per_second": 1e11, "memory_bytes_per_second": 1e10}
    assert layers.view(content, "x")["roofline"] == ""


@given(benches)
@settings(max_examples=300, deadline=None)
def test_any_layers_are_drawn_with_numbers(content):
    found = layers.view(content, "x")
    if found:
        assert "nan" not in found["bars"] + found["roofline"]
        assert "inf" not in found["bars"] + found["roofline"]
