"""mindferry launch: the files it writes, what it refuses, and a start of its script on this machine."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mindferry.cluster import check, files, rank
from mindferry.cluster.job import LaunchJob, check_hosts, hosts_file, hosts_in, job_for, read_job
from mindferry.errors import UsageError
from mindferry.partition.layout import Grid
from mindferry.targets.run_directory import RunDirectory

from ..support import make_source, run_cli


@pytest.fixture(scope="module")
def cut(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run cut for two hosts of two devices, with launch files."""
    folder = tmp_path_factory.mktemp("launch")
    source = make_source(folder / "gpt2")
    done = run_cli(
        "migrate", source, "--data", corpus, "--out", folder / "run", "--seq-length", "32", "--batch-size", "8",
        "--steps", "20", "--cut", "dp=2,mp=2,pp=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = run_cli("launch", folder / "run", "--hosts", "10.0.0.1, 10.0.0.2", "--devices-per-host", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on 10.0.0.2: bash {folder / 'run/launch/start.sh'} 1" in done.stdout
    return folder / "run"


@pytest.fixture
def run(cut: Path, tmp_path: Path) -> RunDirectory:
    return RunDirectory.open(Path(shutil.copytree(cut, tmp_path / "run")))


def msrun_arguments(run: Path, node: str, **environment: str) -> list[str]:
    """What start.sh gives to msrun, as bash expands it: a python that prints its arguments stands in."""
    stand_in = run / "bin/python"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    stand_in.chmod(0o755)
    import os

    env = {**os.environ, "PYTHON": str(stand_in), **environment}
    done = subprocess.run(
        ["bash", str(run / "launch/start.sh"), node], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_msrun_itself_reads_the_arguments(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore's own parser, on both hosts' lines; ranks are node x workers + i there."""
    from mindspore.parallel.cluster.run import get_args

    for node in (0, 1):
        words = msrun_arguments(run.root, str(node))
        assert words[:2] == ["-m", "mindspore.parallel.cluster.run"]
        monkeypatch.setattr("sys.argv", ["msrun", *words[2:]])
        args = get_args()
        assert (args.worker_num, args.local_worker_num, args.node_rank) == (4, 2, node)
        assert (args.master_addr, args.master_port) == ("10.0.0.1", 8118)
        assert args.task_script == str(run.root / "launch/rank.py")


def test_ranks_and_hosts(run: RunDirectory) -> None:
    rows = list(csv.DictReader(io.StringIO((run.root / "launch/ranks.csv").read_text())))
    assert [(row["host"], row["device"]) for row in rows] == [
        ("10.0.0.1", "0"), ("10.0.0.1", "1"), ("10.0.0.2", "0"), ("10.0.0.2", "1"),
    ]  # fmt: skip
    assert [(row["data_parallel"], row["model_parallel"]) for row in rows] == [
        ("0", "0"), ("0", "1"), ("1", "0"), ("1", "1"),
    ]  # fmt: skip
    assert (run.root / "launch/hosts.txt").read_text().splitlines()[1:] == [
        "0 10.0.0.1 ranks 0-1",
        "1 10.0.0.2 ranks 2-3",
    ]


@pytest.mark.parametrize("node", ["2", "-1", "x", "0;reboot", ""])
def test_start_refuses_a_node_that_is_none(run: RunDirectory, node: str) -> None:
    done = subprocess.run(
        ["bash", str(run.root / "launch/start.sh"), *([node] if node else [])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "start.sh" in done.stderr


def test_the_check_starts_it_here(cut: Path) -> None:
    """Four real ranks through start.sh and msrun: numbers, groups, mindformers' reading, weights, data."""
    done = run_cli("launch", cut, "--check", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0, answer
    ranks = answer["dry_run"]["ranks"]
    assert [rank["groups"]["model"] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["groups"]["data"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert {rank["configuration"] for rank in ranks} == {"GPT2Config"}
    whole = json.loads((cut / "migration.json").read_text())["data"]["sequences"]
    assert [rank["rows"] for rank in ranks] == [-(-whole // 2)] * 4
    assert all(rank["weights"] > 0 for rank in ranks)


def ids(run: RunDirectory) -> list[str]:
    return [finding.id for finding in check.static(run, read_job(run.root / "launch"))]


def change(run: RunDirectory, section: str, **values: object) -> None:
    path = run.root / "run.cluster.yaml"
    content = yaml.safe_load(path.read_text())
    (content[section] if section else content).update(values)
    path.write_text(yaml.safe_dump(content))


def test_files_as_written_are_fine(run: RunDirectory) -> None:
    assert ids(run) == []


def test_changed_files_are_seen(run: RunDirectory) -> None:
    start = run.root / "launch/start.sh"
    start.write_text(start.read_text() + "if\n")
    (run.root / "launch/ranks.csv").unlink()
    (run.root / "launch/environment.sh").write_text("export HCCL_IF_IP=1\n")
    assert ids(run) == ["launch.changed", "launch.missing", "launch.syntax"]


def test_what_the_cluster_would_find_is_found_before(run: RunDirectory) -> None:
    shutil.rmtree(run.root / "model-cut/rank_3")
    change(run, "context", device_target="CPU")
    change(run, "", use_parallel=False)
    found = ids(run)
    assert {"launch.weights", "launch.device", "launch.parallel"} <= set(found)


def test_a_broken_rule_of_the_planner_is_found(run: RunDirectory) -> None:
    change(
        run,
        "model",
        model_config={**yaml.safe_load(run.yaml.read_text())["model"]["model_config"], "vocab_size": 257},
    )
    assert any(name.startswith("plan.") for name in ids(run))


def test_an_environment_of_the_clusters_own_is_kept(run: RunDirectory) -> None:
    mine = run.root / "launch/environment.sh"
    mine.write_text("export HCCL_IF_IP=1\n")
    files.write(run.root / "launch", read_job(run.root / "launch"), "run")
    assert mine.read_text() == "export HCCL_IF_IP=1\n"


def test_a_rank_without_weights_is_named(run: RunDirectory) -> None:
    """Each rank reads its own directory, and says which."""
    content = rank.content_of(run, "run.cluster.yaml")
    assert rank._weights(content, 1, 4) > 0
    for path in (run.root / "model-cut/rank_1").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match="model-cut: no weights for rank 1 of 4"):
        rank._weights(content, 1, 4)
    with pytest.raises(UsageError, match="no weights for rank 4 of 8"):
        rank._weights(content, 4, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "a,a"], "host 2: a is host 1, too"),
        (["--hosts", "a,A"], "host 2: A is host 1, too"),
        (["--hosts", "10.0.0.1,b;reboot"], "is no host name or address"),
        (["--hosts", "$(reboot)"], "is no host name or address"),
        (["--hosts", "::1,b"], "::1 means another machine on every host"),
        (["--hosts", "::1,0:0:0:0:0:0:0:1"], "is host 1, too"),
        (["--hosts", ""], "0 hosts, expected 1 to"),
        (["--hosts", "a,b", "--port", "80"], "expected 1024 to 65535"),
        (["--hosts", "a,b,c"], "dp=2,mp=2,pp=1: 2 x 2 x 1 = 4 ranks, found 6 devices"),
        (["--hosts", "a,b", "--yaml", "none.yaml"], "none.yaml"),
        (["--check", "--hosts", "a"], "give no --hosts with it"),
    ],
)
def test_refused_in_one_line(run: RunDirectory, options: list[str], message: str) -> None:
    before = {path.name: path.read_bytes() for path in (run.root / "launch").iterdir()}
    done = run_cli("launch", run.root, "--devices-per-host", "2", *options)
    assert done.returncode == 2, done.stdout
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert before == {path.name: path.read_bytes() for path in (run.root / "launch").iterdir()}


@pytest.mark.parametrize("text", ["", "[]", '{"hosts": ["a"]}', '{"yaml": "x", "hosts": ["a", "a"]}'])
def test_a_damaged_job_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(UsageError):
        read_job(tmp_path)


def test_host_files(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    with pytest.raises(UsageError, match="hosts: No such file"):
        hosts_file(file)
    file.write_bytes(b"a\n\xff")
    with pytest.raises(UsageError, match="byte 2 is no UTF-8"):
        hosts_file(file)
    file.write_bytes(b"\xef\xbb\xbfnode-1\r\nnode-2\r\n")
    assert check_hosts(hosts_file(file)) == ("node-1", "node-2")
    with pytest.raises(UsageError, match="Is a directory"):
        hosts_file(tmp_path)


def test_host_lists() -> None:
    assert hosts_in("# nodes\nnode-1 slots=8\n\n10.0.0.2 # spare\na,b\n") == ["node-1", "10.0.0.2", "a", "b"]


@given(
    st.lists(
        st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9]", fullmatch=True), min_size=1, max_size=9, unique=True
    )
)
def test_scripts_of_any_hosts_are_bash(hosts: list[str]) -> None:
    job = LaunchJob("run.yaml", check_hosts(hosts), 8, 8118, Grid(len(hosts), 8, 1))
    texts = files.texts(job)
    done = subprocess.run(
        ["bash", "-n"], input=texts["start.sh"], text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert texts["ranks.csv"].count("\n") == job.workers + 1


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_a_smaller_grid_keeps_its_kind(dp: int, mp: int, pp: int) -> None:
    found = check.smaller(Grid(dp, mp, pp))
    assert found.ranks <= check.MAX_DRY
    for whole, part in ((dp, found.data_parallel), (mp, found.model_parallel), (pp, found.pipeline_stage)):
        assert whole % part == 0


def test_a_grid_of_other_devices_is_refused() -> None:
    content = {"parallel_config": {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2}}
    with pytest.raises(UsageError, match="= 8 ranks, found 16 devices"):
        job_for(content, "run.yaml", ["a", "b"], 8, 8118)
    assert job_for(content, "run.yaml", ["a"], 8, 8118).workers == 8
