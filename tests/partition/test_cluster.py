"""migrate --cut: the weights a second time, cut, and a YAML that loads them; what the planner's rules say to it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindferry.errors import UsageError
from mindferry.partition.cluster import ClusterCut
from mindferry.partition.layout import Grid
from mindferry.partition.opening import Asked
from mindferry.partition.reshard import Wanted, reshard
from mindferry.planning import constraints, runfile
from mindferry.targets import run_yaml
from mindferry.training import checkpoints

from ..support import make_run, make_source, run_cli
from .making import rank_file, read_whole, same
from .reference import share


@pytest.fixture(scope="module")
def odd_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, so that two stages are uneven."""
    return make_source(tmp_path_factory.mktemp("odd") / "gpt2", n_layer=3)


def test_the_cut_weights_and_their_yaml(odd_source: Path, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run_cli(
        *("migrate", odd_source, "--data", corpus, "--out", out, "--seq-length", "32", "--steps", "4"),
        *("--cut", "dp=2,mp=2,pp=2", "--offset", "0,1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["cut"] == {"strategy": "dp=2,mp=2,pp=2", "layers": [1, 2], "vocab_rows": 300}
    whole = load_file(out / "model" / "model.safetensors")
    spec = runfile.read(out / "run.yaml").model
    assert spec is not None
    for rank in range(8):
        for name, array in load_file(rank_file(out / "model-cut", rank)).items():
            expected = share(name, whole[name], 2, rank % 2, spec, False)
            np.testing.assert_array_equal(array, expected, err_msg=name)
    reshard(out / "model-cut", tmp_path / "back", Asked(), Wanted(Grid()))
    assert same(read_whole(tmp_path / "back"), whole)
    # The file keeps run.yaml's closed schema, and no rule of the planner objects to it.
    content = run_yaml.read(out / "run.cluster.yaml")
    assert content["load_checkpoint"] == "./model-cut"
    assert content["model"]["model_config"]["offset"] == [0, 1]
    read = runfile.read(out / "run.cluster.yaml", devices=8)
    assert constraints.problems(read.layout) == []
    assert not [item for item in read.unread if item.severity == "problem"]
    # As many sequences a step as run.yaml: 1 x 4 micro-batches x 2 replicas.
    plain = run_yaml.read(out / "run.yaml")["runner_config"]["batch_size"]
    runner, parallel = content["runner_config"], content["parallel_config"]
    assert plain == runner["batch_size"] * parallel["micro_batch_num"] * parallel["data_parallel"]


def test_a_strategy_that_does_not_fit_leaves_nothing(odd_source: Path, corpus: Path, tmp_path: Path) -> None:
    cuts = {
        "num_layers 3": ClusterCut(Grid(1, 1, 2)),
        "num_attention_heads 4, num_query_groups 4": ClusterCut(Grid(1, 3, 1)),
        "one rank needs no cut": ClusterCut(Grid()),
        "dp=3 does not divide": ClusterCut(Grid(3, 1, 1)),
        "fewer than the 3 micro-batches": ClusterCut(Grid(2, 1, 3)),
    }
    for words, wanted in cuts.items():
        with pytest.raises(UsageError, match=words):
            make_run(odd_source, corpus, tmp_path / "run", cut=wanted)
        assert not list(tmp_path.glob("run*"))
        assert not list(tmp_path.glob(".run.partial*"))
    done = run_cli(
        *("migrate", odd_source, "--data", corpus, "--out", tmp_path / "run", "--seq-length", "32"),
        *("--pad-vocab",),
    )
    assert done.returncode == 2
    assert "--cut" in done.stderr


def test_a_padded_vocabulary(corpus: Path, tmp_path: Path) -> None:
    """GPT-2's own 50257 rows divide by no mp; here 300 by 8."""
    source = make_source(tmp_path / "gpt2", n_head=8)
    run = make_run(source, corpus, tmp_path / "run", batch_size=4, cut=ClusterCut(Grid(1, 8, 1), None, True))
    content = run_yaml.read(run / "run.cluster.yaml")
    rows = content["model"]["model_config"]["vocab_size"]
    assert rows % 8 == 0
    assert rows > 300
    assert run_yaml.read(run / "run.yaml")["model"]["model_config"]["vocab_size"] == 300
    assert any(
        "padded from 300" in text for text in json.loads((run / "migration.json").read_text())["warnings"]
    )
    found = load_file(rank_file(run / "model-cut", 7))
    assert found["embedding.word_embeddings.weight"].shape == (rows // 8, 48)


def test_a_merged_checkpoint_goes_back_into_its_run(run: Path, tmp_path: Path) -> None:
    """Cut, merged and put back, a run's checkpoint is one that train --resume takes."""
    model = load_file(run / "model" / "model.safetensors")
    moments = {
        f"{m}.{n}": np.full_like(a, i) for i, m in enumerate(("adam_m", "adam_v")) for n, a in model.items()
    }
    rest = {**moments, "global_step": np.array([7], np.int32), "scale_sense": np.array(1, np.float32)}
    state = {
        "step": 7,
        "steps_per_epoch": 5,
        "global_batch_size": 4,
        "samples": 28,
        "seed": 42,
        "skipped_steps": 0,
    }
    saved = checkpoints.save(run / "checkpoints", 7, model, rest, state, keep=1)
    reshard(run, tmp_path / "cut", Asked(), Wanted(Grid(1, 2, 2)))
    reshard(tmp_path / "cut", tmp_path / "back", Asked(), Wanted(Grid()))
    assert checkpoints.problem_with(tmp_path / "back") == ""
    opened = checkpoints.opened(tmp_path / "back")
    assert opened.state == state
    assert same(opened.optimizer(), rest)
    # By its own path inside the run, too, and by name.
    for path, step in ((saved, None), (run, saved.name)):
        out = tmp_path / f"by-{path.name}"
        reshard(path, out, Asked(step=step), Wanted(Grid(1, 2, 2)))
        assert same(load_file(rank_file(out, 3)), load_file(rank_file(tmp_path / "cut", 3)))
