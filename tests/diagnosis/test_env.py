"""The version table against mindformers' own map, and the checks on made-up machines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mindferry.diagnosis.environment import checks, facts, needs, smoke, versions
from mindferry.diagnosis.environment.facts import Facts, Probe
from mindferry.diagnosis.environment.needs import Needs
from mindferry.errors import UsageError

GOOD = Facts(
    python="3.11.7",
    executable="/venv/bin/python",
    prefix="/venv",
    packages={"mindspore": "2.9.0", "mindformers": "1.9.0", "numpy": "1.26.4", "decorator": "5.1.1"},
    path_python="/venv/bin/python",
    path_prefix="/venv",
    compilers={"g++": "/usr/bin/g++", "make": "/usr/bin/make"},
    memory_bytes=32 << 30,
    memory_available_bytes=24 << 30,
    cpus=8,
    cpus_allowed=8,
    disk_free_bytes={"/run": 100 << 30, "/dev/shm": 8 << 30},
    open_files=65536,
    now=1e9,
    installed_at=9e8,
    kernels=("ready", "2 threads"),
)


def ids(facts: Facts, needs: Needs | None = None, target: str | None = None) -> dict[str, str]:
    """Finding id -> severity."""
    return {item.id: item.severity for check in checks.judge(facts, needs, target) for item in check.findings}


def with_packages(**packages: str | None) -> Facts:
    merged = {**GOOD.packages, **{k: v for k, v in packages.items() if v}}
    for name, version in packages.items():
        if version is None:
            merged.pop(name, None)
    return replace(GOOD, packages=merged)


def test_a_good_machine_has_no_findings() -> None:
    assert ids(GOOD) == {}


# -- the table ------------------------------------------------------------------------------------------------
def test_table_agrees_with_mindformers_own_map() -> None:
    spec = pytest.importorskip("importlib.util").find_spec("mindformers")
    own = json.loads((Path(spec.origin).parent / "VERSION_MAP.json").read_text())
    for formers, row in own["mf"].items():
        ours = versions.release(formers)
        assert ours is not None, formers
        assert ours.mindspore[0] == row["prefer"]
        cann = own["ms"][row["prefer"]]["prefer"]
        assert ours.cann == cann
        assert ours.driver == own["cann"][cann]["prefer"]


def test_table_covers_what_it_should() -> None:
    rows = {row.mindformers: row for row in versions.releases()}
    assert next(iter(rows)) == "0.8.0"
    assert list(rows)[-1] == "2.1.0"
    assert len(rows) >= 15
    assert all(row.source for row in rows.values())
    assert [name for name, row in rows.items() if row.gpt2][-1] == "1.5.0"


def test_installed_requirement_agrees_with_the_table() -> None:
    """mindformers' METADATA asks for the MindSpore that the table names."""
    from importlib import metadata

    wanted = [text for text in metadata.requires("mindformers") or [] if text.startswith("mindspore")]
    row = versions.release(metadata.version("mindformers"))
    assert row is not None
    assert wanted == [f"mindspore~={row.mindspore[0]}"]


@pytest.mark.parametrize(
    ("python", "release"), [("3.9", "1.9.0"), ("3.10", "1.9.0"), ("3.11", "1.9.0"), ("3.12", "1.9.0")]
)
def test_newest_that_pip_can_install(python: str, release: str) -> None:
    best = versions.best(python)
    assert best is not None
    assert best.mindformers == release
    assert versions.best("3.13") is None


@pytest.mark.parametrize(
    ("release", "python", "words"),
    [
        ("1.0.0", "3.9", ["mindspore 2.2.0 is not on PyPI"]),
        ("1.5.0", "3.11", ["mindformers 1.5.0 is not on PyPI", "mindspore 2.6.0"]),
        ("1.6.0", "3.12", ["wheels for Python 3.9, 3.10, 3.11 only"]),
        ("2.0.0", "3.12", ["hyper-parallel"]),
        ("2.1.0", "3.12", ["mindspore 2.11.0", "hyper-parallel"]),
        ("1.9.0", "3.11", []),
    ],
)
def test_what_stands_in_the_way_of_a_release(release: str, python: str, words: list[str]) -> None:
    row = versions.release(release)
    assert row is not None
    said = "; ".join(versions.obstacles(row, python))
    assert [word for word in words if word not in said] == []
    assert bool(said) == bool(words)


def test_pip_line_names_what_the_wheels_leave_out() -> None:
    row = versions.release("1.9.0")
    assert row is not None
    assert (
        versions.pip_line(row) == 'pip install mindformers==1.9.0 mindspore==2.9.0 "numpy<2" "decorator>=5"'
    )


@pytest.mark.parametrize("text", ["1.9.0", "mindformers==1.9.0", "mindformers == v1.9.0"])
def test_target_is_read(text: str) -> None:
    assert versions.parse_target(text) == "1.9.0"


@pytest.mark.parametrize(
    "text", ["mindspore==2.9.0", "mindformers>=1.9", "9.9.9", "", "mindformers==1.9.0; rm -rf /"]
)
def test_wrong_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--for"):
        versions.parse_target(text)


# -- case 28 and 43: pairs and NumPy --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("formers", "spore", "found"),
    [
        ("1.3.2", "2.4.10", None),
        ("1.3.2", "2.7.0", "env.wrong-pair"),
        ("1.9.0", "2.9.0", None),
        ("1.9.0", "2.9.0.post1", None),
        ("1.9.0", "2.10.0", "env.wrong-pair"),
        ("1.1.0", "2.3.0", "env.wrong-pair"),
        ("3.0.0", "2.9.0", "env.unknown-pair"),
        ("1.0.0", "2.2.0", "env.unstable-pair"),
    ],
)
def test_pairs(formers: str, spore: str, found: str | None) -> None:
    got = {k for k in ids(with_packages(mindformers=formers, mindspore=spore)) if "pair" in k}
    assert got == ({found} if found else set())


def test_wrong_pair_names_both_ways_out() -> None:
    made = checks.judge(with_packages(mindformers="1.8.0"))
    (item,) = [item for check in made for item in check.findings if item.id == "env.wrong-pair"]
    assert "needs mindspore 2.7.2, found 2.9.0" in item.message
    assert "pip install mindformers==1.8.0 mindspore==2.7.2" in item.remedy
    assert "mindformers 1.9.0 for this mindspore" in item.remedy


@pytest.mark.parametrize(
    ("spore", "numpy", "wrong"),
    [
        ("2.9.0", "2.1.0", True),
        ("2.10.0", "2.2.6", True),
        ("2.9.0", "1.26.4", False),
        ("2.11.0", "2.2.6", False),
    ],
)
def test_numpy(spore: str, numpy: str, wrong: bool) -> None:
    assert ("env.numpy-2" in ids(with_packages(mindspore=spore, numpy=numpy))) == wrong


def test_case_43_numpy_two_really_fails_the_probe() -> None:
    said = "SystemError: A module that was compiled using NumPy 1.x cannot be run in NumPy 2.2.6"
    found = ids(replace(GOOD, probes={"alone": Probe({"mindspore": said})}))
    assert found["env.import"] == "problem"


# -- the other findings ---------------------------------------------------------------------------------------
ASCEND = Needs(device="Ascend")


@pytest.mark.parametrize(
    ("changes", "needs", "expected"),
    [
        ({"python": "3.13.1"}, None, {"env.python": "problem"}),
        ({"path_prefix": "/usr"}, None, {"env.msrun-python": "warning"}),
        ({"path_prefix": "/usr"}, Needs(parallel=True), {"env.msrun-python": "problem"}),
        ({"path_python": ""}, None, {"env.msrun-python": "warning"}),
        ({"compilers": {"g++": "", "make": "/usr/bin/make"}}, None, {"env.no-compiler": "warning"}),
        ({"compilers": {"g++": "", "make": ""}}, Needs(fused=True), {"env.no-compiler": "problem"}),
        ({"kernels": ("failing", "OSError: x")}, None, {"env.kernels": "warning"}),
        ({"memory_available_bytes": 1 << 30}, None, {"env.memory": "problem"}),
        ({}, Needs(memory_bytes=40 << 30), {"env.memory": "problem"}),
        ({}, Needs(disk_bytes=500 << 30), {"env.disk": "problem"}),
        ({"disk_free_bytes": {"/run": 1 << 30}}, None, {"env.disk": "warning"}),
        ({"disk_free_bytes": {"/run": 100 << 30, "/dev/shm": 1 << 20}}, None, {"env.shm": "warning"}),
        ({"cpus_allowed": 2}, None, {"env.cpus": "info"}),
        ({"cpu_quota": 1.5}, Needs(workers=16), {"env.cpus": "info", "env.workers": "warning"}),
        ({"open_files": 256}, None, {"env.open-files": "warning"}),
        ({"installed_at": 2e9}, None, {"env.clock": "warning"}),
        ({}, ASCEND, {"env.no-npu": "problem", "env.no-cann": "problem"}),
        ({"npus": 8, "cann": "9.0.0", "cann_home": "/a", "cann_sourced": True}, ASCEND, {}),
        ({"npus": 8, "cann": "9.0.0", "cann_home": "/a"}, ASCEND, {"env.cann-not-sourced": "problem"}),
        (
            {"npus": 8, "cann": "8.0.RC2", "cann_home": "/a", "cann_sourced": True},
            ASCEND,
            {"env.cann-version": "problem"},
        ),
        ({}, Needs(device="GPU"), {"env.gpu": "problem"}),
    ],
)
def test_findings_on_made_up_machines(changes: dict, needs: Needs | None, expected: dict) -> None:
    assert ids(replace(GOOD, **changes), needs) == expected


def test_missing_packages() -> None:
    assert ids(with_packages(mindformers=None)) == {"env.no-mindformers": "problem"}
    assert ids(with_packages(decorator=None)) == {"env.decorator": "warning"}
    assert ids(with_packages(decorator=None), Needs(graph_kernel=True)) == {"env.decorator": "problem"}


def test_clash_with_torch_is_told_from_a_broken_mindspore() -> None:
    fine, dead = Probe({"mindspore": "ok", "mindformers": "ok"}), Probe({"torch": "ok"}, "exit code -11")
    assert ids(replace(GOOD, probes={"alone": fine, "torch first": dead})) == {"env.torch-clash": "warning"}
    assert ids(replace(GOOD, probes={"alone": Probe({}, "exit code -11"), "torch first": dead})) == {
        "env.import": "problem"
    }


def test_requirements_of_the_packages_themselves() -> None:
    texts = [
        "numpy<2",
        "transformers==4.51.3",
        "notthere-at-all>=1",
        'only-on-windows; sys_platform == "win32"',
    ]
    made = checks.judge(
        replace(
            GOOD, requirements={"mindformers": texts}, packages={**GOOD.packages, "transformers": "4.57.1"}
        )
    )
    (item,) = [item for check in made for item in check.findings]
    assert item.id == "env.requirements"
    assert "transformers==4.51.3 (found 4.57.1)" in item.message
    assert "notthere-at-all>=1 (missing)" in item.message
    assert "windows" not in item.message


def test_target_release() -> None:
    assert ids(GOOD, target="1.9.0") == {"env.target": "info"}
    made = checks.judge(GOOD, target="1.3.2")
    (item,) = [item for check in made for item in check.findings]
    assert item.id == "env.target-not-installable"
    assert "mindformers==1.9.0 mindspore==2.9.0" in item.remedy
    assert "CANN 8.0.0" in item.cause


# -- a run's needs, and this machine for real -----------------------------------------------------------------
def test_needs_are_read_from_the_run(tmp_path: Path) -> None:
    from mindferry.diagnosis.tiny import make_run

    root = make_run(
        tmp_path / "run", changes={"context.enable_graph_kernel": True, "context.device_target": "Ascend"}
    )
    asked = needs.needs_of(root)
    assert asked is not None
    size = (root / "model/model.safetensors").stat().st_size
    assert (asked.device, asked.graph_kernel, asked.memory_bytes) == ("Ascend", True, 4 * size)
    assert asked.disk_bytes == 9 * size
    with pytest.raises(UsageError):
        needs.needs_of(tmp_path)


def test_this_machine_passes_and_a_tiny_model_trains() -> None:
    found = facts.gather(probe=False)
    found.probes["alone"] = facts.run_probe(["mindspore", "mindformers"])
    assert found.python == sys.version.split()[0]
    assert found.probes["alone"].steps == {"mindspore": "ok", "mindformers": "ok"}
    made = {check.name: check for check in checks.judge(found)}
    assert [name for name, check in made.items() if check.mark == "FAIL"] == []
    done = smoke.run()
    assert smoke.judge(done) == []
    assert len(done.losses) == smoke.STEPS


def test_broken_smoke_training_gets_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The child process finds no `mindspore`: the start-up doctor names it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Hide:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'mindspore':\n            raise ModuleNotFoundError(\"No module named 'mindspore'\")\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (item,) = smoke.judge(smoke.run())
    assert item.id == "env.smoke"
    assert "MindSpore alone failed" in item.message
    assert "no mindspore" in item.message


def test_loss_that_does_not_fall_is_a_finding() -> None:
    stages = {"MindSpore alone": 1.0, "mindformers Trainer": 2.0}
    (item,) = smoke.judge(smoke.Smoke(stages, [4.0, 4.0]))
    assert "did not fall" in item.message
    assert smoke.judge(smoke.Smoke(stages, [4.0, 3.5])) == []
