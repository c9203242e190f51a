"""What cannot be resharded: one clear error each, and no output."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindferry.errors import MindferryError, UsageError
from mindferry.partition.layout import Grid
from mindferry.partition.opening import Asked
from mindferry.partition.reshard import Wanted, reshard
from mindferry.spec import ModelSpec

from ..support import gpt2_spec, run_cli
from .making import rank_file, read_whole, same, tensors_of, write_whole, write_yaml

GRID = Grid(2, 2, 2)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return gpt2_spec(num_attention_heads=4, num_query_groups=2, kv_channels=4)


@pytest.fixture(scope="module")
def origin(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole/, cut/ (8 ranks) and the two YAMLs."""
    root = tmp_path_factory.mktemp("origin")
    write_yaml(root / "run.yaml", spec)
    write_yaml(root / "cluster.yaml", spec, data_parallel=2, model_parallel=2, pipeline_stage=2)
    write_whole(root / "whole", tensors_of(spec, moments=True))
    reshard(root / "whole", root / "cut", Asked(config=root / "run.yaml"), Wanted(GRID))
    return root


@pytest.fixture
def cut(origin: Path, tmp_path: Path) -> Path:
    """A copy to damage, replicas as files of their own."""
    shutil.copytree(origin / "cut", tmp_path / "cut")
    return tmp_path / "cut"


def change(path: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def refused(path: Path, words: str, kind: type[MindferryError] = MindferryError, **asked: object) -> None:
    """Merging fails with `words`, and nothing is left beside the checkpoint."""
    out = path.parent / "out"
    with pytest.raises(kind, match=words):
        reshard(path, out, Asked(**asked), Wanted(Grid()))  # type: ignore[arg-type]
    assert not out.exists()
    assert not list(path.parent.glob(".out*"))


def test_a_missing_rank(cut: Path) -> None:
    shutil.rmtree(cut / "rank_3")
    refused(cut, "1 of 8 ranks are missing: rank_3")


def test_a_missing_stage(cut: Path) -> None:
    for rank in (4, 5, 6, 7):
        shutil.rmtree(cut / f"rank_{rank}")
    refused(cut, "4 of 8 ranks are missing: rank_4, rank_5, rank_6, rank_7")


def test_a_missing_stage_without_the_manifest(cut: Path, origin: Path) -> None:
    """Four ranks of eight look like a smaller strategy; then the second stage's tensors are missed by name."""
    (cut / "partition.json").unlink()
    for rank in (4, 5, 6, 7):
        shutil.rmtree(cut / f"rank_{rank}")
    refused(cut, "ranks are missing", config=origin / "cluster.yaml")
    refused(cut, "rank 0 lacks .* tensors of its stage", config=origin / "run.yaml", grid=Grid(2, 2, 1))


def test_more_ranks_than_the_strategy(cut: Path, origin: Path) -> None:
    (cut / "partition.json").unlink()
    refused(cut, "has 4 ranks, found also rank_4", UsageError, config=origin / "run.yaml", grid=Grid(1, 2, 2))


def test_an_empty_rank(cut: Path) -> None:
    rank_file(cut, 2).unlink()
    refused(cut, "rank_2: 0 safetensors files, expected one")


def test_a_rank_of_another_step_by_its_name(cut: Path, origin: Path) -> None:
    old = rank_file(cut, 5)
    old.rename(old.with_name(old.name.replace("-3_2", "-3_1")))
    refused(cut, "no step is there for every rank .asked for 3_2.")
    (cut / "partition.json").unlink()
    refused(cut, "no step is there for every rank; found rank_0: 3_2", config=origin / "cluster.yaml")


def test_a_rank_of_another_step_by_its_counter(cut: Path, origin: Path) -> None:
    (cut / "partition.json").unlink()
    change(rank_file(cut, 5), lambda tensors: tensors.update(global_step=np.array([11], np.int32)))
    refused(cut, r"global_step is \[12\] on rank 0 and \[11\] on rank 5", config=origin / "cluster.yaml")


def test_the_newest_step_that_all_have_is_taken(cut: Path, origin: Path, tmp_path: Path) -> None:
    """A kill while saving leaves a newer file on some ranks."""
    (cut / "partition.json").unlink()
    newer = rank_file(cut, 0)
    shutil.copy(newer, newer.with_name(newer.name.replace("-3_2", "-3_3")))
    report = reshard(cut, tmp_path / "out", Asked(config=origin / "cluster.yaml"), Wanted(Grid()))
    assert any("3_3" in text for text in report.warnings)


def test_the_file_of_another_rank(cut: Path) -> None:
    other = rank_file(cut, 1)
    shutil.copy(other, rank_file(cut, 0).with_name(other.name))
    refused(cut, "file of rank 1 lies in the directory of rank 0")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda t: t.update({"decoder.layers.0.mlp.linear_fc3.weight": np.ones((2, 2), np.float32)}),
            "linear_fc3",
        ),
        (
            lambda t: t.update({"decoder.layers.2.mlp.linear_fc1.bias": np.ones(32, np.float32)}),
            "num_layers is 2",
        ),
        (
            lambda t: t.update({"decoder.layers.1.mlp.linear_fc1.bias": np.ones(32, np.float32)}),
            "another stage",
        ),
        (
            lambda t: t.update({"decoder.final_layernorm.weight": np.ones(16, np.float32)}),
            "no such parameter",
        ),
        (lambda t: t.pop("decoder.layers.0.mlp.linear_fc1.bias"), "lacks 1 tensors of its stage"),
        (lambda t: t.pop("adam_v.decoder.layers.0.mlp.linear_fc1.bias"), "lacks 1 tensors of its stage"),
        (
            lambda t: t.update({"decoder.layers.0.mlp.linear_fc1.bias": np.ones(64, np.float32)}),
            r"linear_fc1.bias: found \[64\], expected \[32\]",
        ),
        (
            lambda t: t.update({"decoder.layers.0.mlp.linear_fc1.bias": np.ones(16, np.float32)}),
            r"found \[16\], expected \[32\]",
        ),
        (
            lambda t: t.update({"decoder.layers.0.mlp.linear_fc1.bias": np.ones(32, np.float16)}),
            "is float16, on another rank float32",
        ),
    ],
)
def test_tensors_that_do_not_belong(
    cut: Path, edit: Callable[[dict[str, np.ndarray]], None], words: str
) -> None:
    change(rank_file(cut, 1), edit)
    refused(cut, words)


def test_changed_numbers_are_found_by_the_checksum(cut: Path) -> None:
    name = "decoder.layers.0.mlp.linear_fc1.bias"
    change(rank_file(cut, 1), lambda tensors: tensors[name].__setitem__(0, 7))
    refused(cut, f"{name}: sha256 .* partition.json says")


def test_replicas_that_differ(cut: Path, origin: Path, tmp_path: Path) -> None:
    """A bit in the second replica, in a share and in something that is whole everywhere."""
    for name in ("decoder.layers.0.mlp.linear_fc1.bias", "decoder.layers.0.input_layernorm.gamma"):
        shutil.rmtree(tmp_path / "again", ignore_errors=True)
        shutil.copytree(cut, tmp_path / "again")
        change(rank_file(tmp_path / "again", 3), lambda tensors, n=name: tensors[n].__setitem__(0, 7))  # type: ignore[misc]
        refused(tmp_path / "again", "differs from")
    report = reshard(tmp_path / "again", tmp_path / "taken", Asked(), Wanted(Grid(), take_first=True))
    assert same(read_whole(tmp_path / "taken"), read_whole(origin / "whole")), report


def test_a_cut_off_file(cut: Path) -> None:
    path = rank_file(cut, 6)
    path.write_bytes(path.read_bytes()[:-8])
    refused(cut, "the file is cut off")


def test_a_link_that_leads_away(cut: Path, tmp_path: Path) -> None:
    path = rank_file(cut, 6)
    shutil.move(path, tmp_path / "elsewhere.safetensors")
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    refused(cut, "leads out of the directory")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 2}', "cannot be read"),
        ('{"format": 1, "format": 1}', "occurs twice"),
    ],
)
def test_a_damaged_manifest(cut: Path, text: str, words: str) -> None:
    (cut / "partition.json").write_text(text)
    refused(cut, words)


def test_a_manifest_that_lies_about_the_layers(cut: Path) -> None:
    tree = json.loads((cut / "partition.json").read_text())
    tree["layers"] = [[0, 1], []]
    (cut / "partition.json").write_text(json.dumps(tree))
    refused(cut, "are not what offset 0 gives")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["model"].update(num_layers=10**9), "1000000000 layers and"),
        (
            lambda t: t["grid"].update(data_parallel=60000, model_parallel=2, pipeline_stage=2),
            "ranks are missing",
        ),
        (lambda t: t["grid"].update(model_parallel=10**9), "cannot be read"),
        (lambda t: t["tensors"].pop("global_step"), "there and not listed: global_step"),
        (lambda t: t.update(vocab_rows=49), "vocab_size 49"),
        (lambda t: t.update(vocab_rows=48), "found .25, 16., expected .24, 16."),
        (lambda t: t.update(file_suffix="../../x"), "no step is there"),
        (lambda t: t.update(offset={"a": 1}), "offset"),
    ],
)
def test_manifests_that_lie(cut: Path, change: Callable[[dict[str, object]], None], words: str) -> None:
    tree = json.loads((cut / "partition.json").read_text())
    change(tree)
    (cut / "partition.json").write_text(json.dumps(tree))
    refused(cut, words)


def test_what_must_be_said(origin: Path, cut: Path) -> None:
    refused(origin / "whole", "tensors alone do not say", UsageError)
    refused(origin / "whole", "--from says dp=2", UsageError, grid=GRID, config=origin / "run.yaml")
    refused(origin / "nothing", "no such directory", UsageError)
    (cut / "partition.json").unlink()
    refused(cut, "no partition.json in it", UsageError)
    (cut / "rank_8").write_text("")
    refused(cut, "not a directory of a rank", config=origin / "cluster.yaml")


def test_an_output_that_is_taken(origin: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("")
    with pytest.raises(UsageError, match="not empty"):
        reshard(origin / "cut", tmp_path / "out", Asked(), Wanted(Grid()))


def test_the_command_names_the_key(origin: Path, tmp_path: Path) -> None:
    common = ("reshard", origin / "whole", "--config", origin / "run.yaml", "--out", tmp_path / "out")
    done = run_cli(*common, "--to", "mp=4")
    assert done.returncode == 2
    assert "num_query_groups 2 are no multiples" in done.stderr
    done = run_cli(*common, "--to", "dp=2,mp=2", "--devices", "8")
    assert done.returncode == 2
    assert "= 4 ranks, found 8 devices" in done.stderr
    done = run_cli(*common, "--to", "pp=2", "--offset", "a")
    assert done.returncode == 2
    assert "--offset" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_kill_leaves_nothing_that_looks_finished(spec: ModelSpec, tmp_path: Path) -> None:
    """Killed at random moments of writing; the next attempt clears up and gives the whole result."""
    big = spec.model_copy(update={"vocab_size": 400_000})
    made = tensors_of(big, moments=True)
    write_whole(tmp_path / "whole", made)
    config = write_yaml(tmp_path / "run.yaml", big)
    command = [sys.executable, "-m", "mindferry", "reshard", str(tmp_path / "whole"), "--config", str(config)]
    command += ["--to", "dp=2,mp=2,pp=2", "--out", str(tmp_path / "out")]
    killed = 0
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(tmp_path.glob(".out.partial-*/rank_*/.*")):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += not (tmp_path / "out").exists()
        if (tmp_path / "out").exists():  # it was quicker
            shutil.rmtree(tmp_path / "out")
    assert killed
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["out", "run.yaml", "whole"]
    reshard(tmp_path / "out", tmp_path / "back", Asked(), Wanted(Grid()))
    assert same(read_whole(tmp_path / "back"), made)
