"""train --workers: real processes, the losses of one."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mindferry.errors import UsageError
from mindferry.targets.run_directory import RunDirectory
from mindferry.training import data_parallel, engine, workers
from mindferry.training.reduction import buckets

from ..support import make_run, make_source, run_cli

STEPS = 50


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source without dropout: processes draw masks of their own."""
    folder = tmp_path_factory.mktemp("smooth")
    return make_source(folder / "gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)


@pytest.fixture(scope="module")
def single(smooth: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained by one process: 4 sequences in each of 2 micro-batches."""
    run = make_run(smooth, corpus, tmp_path_factory.mktemp("single") / "run", accumulation=2)
    engine.train(RunDirectory.open(run), engine.Options(steps=STEPS))
    return run


def untrained(run: Path, out: Path, **sections: dict[str, Any]) -> Path:
    """A copy of `run` without its training; `sections` change its run.yaml."""
    shutil.copytree(run, out, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl", "logs"))
    content = yaml.safe_load((out / "run.yaml").read_text())
    for section, keys in sections.items():
        content[section].update(keys)
    (out / "run.yaml").write_text(yaml.safe_dump(content))
    return out


def trained(run: Path, count: int, **options: Any) -> Any:
    return workers.train(RunDirectory.open(run), engine.Options(workers=count, **options))


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def worst(run: Path, other: Path) -> float:
    """Largest relative difference of a step's loss; both have the same steps."""
    pairs = list(zip(metrics(run), metrics(other), strict=True))
    assert all(a["step"] == b["step"] for a, b in pairs)
    return max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)


def test_two_processes_give_the_losses_of_one(single: Path, tmp_path: Path) -> None:
    run = untrained(single, tmp_path / "run")
    seen: list[int] = []
    outcome = trained(run, 2, steps=STEPS, on_step=lambda record: seen.append(record["step"]))
    assert seen == list(range(1, STEPS + 1)), "every step reaches the progress bar"
    assert worst(run, single) <= 1e-5
    assert outcome.losses[STEPS] == pytest.approx(metrics(single)[-1]["loss"], rel=1e-5)
    mine, others = metrics(run), [json.loads(x) for x in (run / "logs/metrics.rank_1.jsonl").open()]
    for a, b in zip(mine, others, strict=True):
        assert (a["rank_loss"] + b["rank_loss"]) / 2 == pytest.approx(a["loss"], rel=1e-5)
        assert [a[key] for key in ("loss", "grad_norm", "lr")] == [
            b[key] for key in ("loss", "grad_norm", "lr")
        ]
        parts = a["forward_backward_time"] + a["wait_time"] + a["reduce_time"]
        assert 0 < parts <= a["compute_time"]
        assert a["reductions"] == 1, "gradients travel once a step, not once a micro-batch"
        assert a["tokens_per_second"] == pytest.approx(8 * 32 / a["step_time"])
    theirs = load_file(single / f"checkpoints/step-{STEPS:08d}/model/model.safetensors")
    ours = load_file(run / f"checkpoints/step-{STEPS:08d}/model/model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.endswith("linear_qkv.bias"):
            continue  # a key's bias has no gradient but rounding, which AdamW makes steps of
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-4 * np.abs(value).max(), err_msg=name)


def test_four_processes_share_micro_batches_and_the_optimizer(single: Path, tmp_path: Path) -> None:
    """A micro-batch of 2 does not divide by 4, 4 micro-batches do."""
    run = untrained(
        single,
        tmp_path / "run",
        runner_config={"batch_size": 2, "gradient_accumulation_steps": 4},
        parallel={
            "enable_parallel_optimizer": True,
            "comm_fusion": {"allreduce": {"mode": "size", "config": 0.05}},
        },
    )
    outcome = trained(run, 4, steps=STEPS)
    assert worst(run, single) <= 1e-5
    whole = load_file(single / f"checkpoints/step-{STEPS:08d}/optimizer.safetensors")
    shared = load_file(run / f"checkpoints/step-{STEPS:08d}/optimizer.safetensors")
    moments = [name for name in whole if name.startswith(("adam_m.", "adam_v."))]
    assert shared.keys() == whole.keys(), "any number of processes reads it"
    for name in moments:
        scale = np.abs(whole[name]).max()
        np.testing.assert_allclose(shared[name], whole[name], rtol=0, atol=1e-3 * scale + 1e-12, err_msg=name)
    size = sum(whole[name].nbytes for name in moments)
    assert size / 4 <= outcome.optimizer_bytes <= size / 4 * 1.01


def test_shared_moments_go_on_in_another_number_of_processes(single: Path, tmp_path: Path) -> None:
    run = untrained(single, tmp_path / "run", parallel={"enable_parallel_optimizer": True})
    trained(run, 2, steps=7)
    engine.train(RunDirectory.open(run), engine.Options(steps=12, resume=True))
    trained(run, 2, steps=18, resume=True)
    assert [r["loss"] for r in metrics(run)] == pytest.approx(
        [r["loss"] for r in metrics(single)[:18]], rel=1e-5
    )


def test_an_epoch_that_does_not_divide_is_the_one_of_one_process(
    smooth: Path, corpus: Path, tmp_path: Path
) -> None:
    """MindSpore would repeat sequences to fill the shards up, and so begin the second epoch later."""
    one = make_run(smooth, corpus, tmp_path / "one", batch_size=68)
    many = untrained(one, tmp_path / "many")
    engine.train(RunDirectory.open(one), engine.Options(steps=14))
    state = json.loads((one / "checkpoints/step-00000014/state.json").read_text())
    assert state["steps_per_epoch"] < 14
    done = run_cli("train", many, "--steps", "14", "--workers", "4", "--json")
    assert worst(many, one) <= 1e-5
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"], answer["steps"]) == (0, "good", [0, 14])
    crowded = len(os.sched_getaffinity(0)) < 4
    assert [finding["id"] for finding in answer["findings"]] == ["workers.cores"] * crowded


def test_half_precision_on_the_wire_is_close(single: Path, tmp_path: Path) -> None:
    run = untrained(single, tmp_path / "run", runner_wrapper={"gradient_wire_dtype": "float16"})
    trained(run, 2, steps=STEPS)
    assert 0 < worst(run, single) <= 1e-3, "it rounds, a little"


def test_reducing_every_micro_batch_is_the_same_sum_and_counted(single: Path, tmp_path: Path) -> None:
    run = untrained(single, tmp_path / "run", runner_wrapper={"reduce_every_micro_batch": True})
    trained(run, 2, steps=10)
    assert [r["loss"] for r in metrics(run)] == pytest.approx(
        [r["loss"] for r in metrics(single)[:10]], rel=1e-5
    )
    assert {r["reductions"] for r in metrics(run)} == {2}


@pytest.mark.parametrize(
    ("sections", "found"),
    [
        ({"runner_config": {"batch_size": 3, "gradient_accumulation_steps": 5}}, "batch_size 3"),
        ({"parallel_config": {"model_parallel": 2}}, "parallel_config.model_parallel"),
        ({"parallel_config": {"pipeline_stage": 2}}, "parallel_config.pipeline_stage"),
        ({"runner_wrapper": {"gradient_wire_dtype": "int8"}}, "gradient_wire_dtype"),
        ({"parallel": {"comm_fusion": {"allreduce": {"mode": "size", "config": -1}}}}, "comm_fusion"),
    ],
)
def test_what_cannot_be_shared_out_is_said_before_anything_starts(
    single: Path, tmp_path: Path, sections: dict, found: str
) -> None:
    run = untrained(single, tmp_path / "run", **sections)
    with pytest.raises(UsageError, match=found):
        trained(run, 2, steps=2)
    assert not (run / "logs" / "workers").exists()


def test_another_optimizer_is_not_shared_out() -> None:
    content = {
        "runner_config": {"batch_size": 2, "gradient_accumulation_steps": 1},
        "parallel": {"enable_parallel_optimizer": True},
        "optimizer": {"type": "Lamb"},
    }
    with pytest.raises(UsageError, match="Lamb"):
        data_parallel.share_out(content, 2)


def test_more_processes_than_cores_is_said() -> None:
    cores = len(os.sched_getaffinity(0))
    assert workers.too_many(cores) == ""
    assert f"{cores} cores" in workers.too_many(cores + 1)


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=50), limit=st.integers(1, 200))
def test_buckets_hold_every_parameter_once_in_order(sizes: list[int], limit: int) -> None:
    found = buckets(sizes, limit)
    assert [index for bucket in found for index in bucket] == list(range(len(sizes)))
    assert all(len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit for bucket in found)
    for one, other in itertools.pairwise(found):
        assert sum(sizes[i] for i in one) + sizes[other[0]] > limit, "no bucket is cut before it is full"
