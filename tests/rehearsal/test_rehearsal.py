"""Rehearsals by real processes: right strategies pass, planted mistakes are named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mindferry.diagnosis import tiny
from mindferry.errors import UsageError
from mindferry.partition import layout, rules
from mindferry.partition.layout import Place, Stages, parse_grid
from mindferry.rehearsal import before, checkpoints, judge, plan, reference, session
from mindferry.rehearsal.session import Report
from mindferry.rehearsal.topology import Topology
from mindferry.spec import ModelSpec
from mindferry.targets.run_directory import RunDirectory

from ..support import gpt2_spec, run_cli

SPECS = {
    "gpt2": gpt2_spec(
        vocab_size=80, hidden_size=32, num_layers=3, num_attention_heads=4, num_query_groups=4,
        max_position_embeddings=16, tie_word_embeddings=True,
    ),
    "llama": gpt2_spec(
        family="llama", vocab_size=120, hidden_size=32, num_attention_heads=8, num_query_groups=2, kv_channels=4,
        max_position_embeddings=16, position_embedding="rope", normalization="RMSNorm", activation="silu",
        gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=False,
    ),
    "qwen3": gpt2_spec(
        family="qwen3", vocab_size=64, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=16,
        max_position_embeddings=16, position_embedding="rope", normalization="RMSNorm", activation="silu",
        gated_linear_unit=True, add_bias_linear=False, add_qkv_bias=False, qk_layernorm=True,
        tie_word_embeddings=True,
    ),
    "gpt_neox": gpt2_spec(
        family="gpt_neox", vocab_size=64, hidden_size=32, num_attention_heads=4, num_query_groups=4, kv_channels=8,
        max_position_embeddings=16, position_embedding="rope", rotary_percent=0.25, activation="gelu_erf",
        parallel_residual=True,
    ),
}  # fmt: skip

CONTIGUOUS = {
    "model.model_config.use_contiguous_weight_layout_attention": True,
    "model.model_config.use_interleaved_weight_layout_mlp": False,
}
PER_TOKEN = {
    "runner_wrapper.calculate_per_token_loss": True,
    "runner_config.gradient_accumulation_steps": 2,
}


def make_plan(
    root: Path, spec: ModelSpec, grid: str, changes: dict[str, Any] | None = None, **options: Any
) -> plan.Plan:
    if not root.exists():
        tiny.make_run(root, spec=spec, batch_size=2, changes=changes)
    settings = plan.Options(grid=parse_grid(grid), steps=2, **options)
    return plan.make(RunDirectory.open(root), settings)


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patch:
        yield patch


def plain_rows(patch: pytest.MonkeyPatch) -> None:
    """q, k and v of a contiguous packing cut as plain rows, as MindSpore's automatic slicing does it."""
    for name in ("weight", "bias"):
        pattern = f"decoder.layers.{{}}.self_attention.linear_qkv.{name}"
        patch.setitem(rules._BY_PATTERN, pattern, replace(rules._BY_PATTERN[pattern], parts=None))


def swapped_shares(patch: pytest.MonkeyPatch) -> None:
    """The inner MLP's shares in the opposite order of the outer one's."""
    ranges = rules.Cut.ranges

    def backward(self: rules.Cut, rank: int) -> list[tuple[int, int]]:
        fc1 = self.ranks > 1 and self.dim == 0 and self.shape == (64, 32)
        return ranges(self, self.ranks - 1 - rank if fc1 else rank)

    patch.setattr(rules.Cut, "ranges", backward)


def no_check_of_groups(patch: pytest.MonkeyPatch) -> None:
    """Let the ranks start in spite of a layout that is found wrong beforehand."""
    patch.setattr(before, "groups", lambda plan, topology: [])


TRANSPOSED = Topology(
    tensor=((0, 2), (1, 3)), data=((0, 1), (2, 3)), pipeline=((0,), (1,), (2,), (3,))
)  # dp innermost, mp outermost
Plant = Callable[[pytest.MonkeyPatch], None] | None

# name -> (family, strategy, options, what run.yaml says, mistake, communication groups)
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any] | None, Plant, Topology | None]] = {
    "gpt2": ("gpt2", "mp=2,pp=2", {"offset": [1, 0], "sequence": True}, None, None, None),
    "llama": ("llama", "dp=2,mp=2", {}, PER_TOKEN, None, None),
    "qwen3": ("qwen3", "mp=2,pp=2", {"micro_batches": 3}, CONTIGUOUS, None, None),
    "gpt_neox": ("gpt_neox", "dp=2,pp=2", {}, None, None, None),
    "packing": ("qwen3", "mp=2,pp=2", {"micro_batches": 3}, CONTIGUOUS, plain_rows, None),
    "shares": ("gpt2", "dp=2,mp=2", {}, None, swapped_shares, None),
    "groups": ("gpt2", "dp=2,mp=2", {}, None, no_check_of_groups, TRANSPOSED),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Every case in the same four processes."""
    root = tmp_path_factory.mktemp("rehearsals")
    monkeypatch = pytest.MonkeyPatch()
    found: dict[str, Report] = {}
    cases = []
    for name, (family, grid, options, changes, plant, topology) in CASES.items():
        with planted(monkeypatch) as patch:
            if plant:
                plant(patch)
            made = make_plan(root / f"{family}-run{bool(changes)}", SPECS[family], grid, changes, **options)
            found[name] = Report(made)
            case = session.prepare(made, root / name, found[name], topology)
            assert case is not None, found[name].findings
            cases.append(case)
    _remember_references(monkeypatch)
    for (name, settings), case, results in zip(CASES.items(), cases, session.run(cases, root), strict=True):
        with planted(monkeypatch) as patch:
            if settings[4]:
                settings[4](patch)
            session.judged(case, results, found[name])
    monkeypatch.undo()
    return found


def _remember_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases of one run and batch have the same single process; it trains once."""
    known: dict[Any, reference.Reference] = {}
    run = reference.run

    def remembered(made: plan.Plan, weights: Any, ids: np.ndarray, *rest: Any) -> reference.Reference:
        key = (made.run.root, ids.shape, made.grid, str(made.offset))
        if key not in known:
            known[key] = run(made, weights, ids, *rest)
        return known[key]

    monkeypatch.setattr(reference, "run", remembered)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gpt_neox"])
def test_the_cut_model_is_the_model(reports: dict[str, Report], name: str) -> None:
    """Against mindformers' own network in one process: losses, gradients, weights after two steps."""
    report = reports[name]
    assert [finding.message for finding in report.findings if finding.severity == "problem"] == []
    assert report.loss_error <= 1e-5
    assert report.grad_norm_error <= 1e-5
    assert report.weights_error <= 1e-5
    assert len(report.gradients) == len(
        {judge.kind_of(name) for name in session.target_names(report.plan.spec)}
    )
    assert all(row.error <= 1e-5 and row.ratio == pytest.approx(1, abs=1e-4) for row in report.gradients)


def test_ranks_hold_what_the_strategy_gives_them(reports: dict[str, Report]) -> None:
    """gpt2, mp=2, pp=2, offset [1, 0]: layers 0-1 and 2; the tied table on both ends; sizes by hand."""
    rows = reports["gpt2"].ranks
    assert [row["layers"] for row in rows] == [[0, 1], [0, 1], [2], [2]]
    assert [(row["stage"], row["replica"], row["share"]) for row in rows] == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1),
    ]  # fmt: skip
    # A layer: qkv 96 x 32 + 96, fc1 64 x 32 + 64 and proj, fc2 without their biases are halved.
    layer = (96 * 32 + 96 + 64 * 32 + 64 + 32 * 32 + 32 * 64) // 2 + 32 + 32 + 4 * 32
    assert rows[0]["parameters"] == 2 * layer + (80 + 16) * 32 // 2
    assert rows[2]["parameters"] == layer + 80 * 32 // 2 + 2 * 32
    # Two steps of two micro-batches [16 / 2, 2, 32] float32: activations one way, gradients the other.
    assert rows[0]["bytes"]["pipeline"] == 2 * 2 * (8 * 2 * 32 * 4)
    assert rows[0]["bytes"]["tied"] == 2 * (80 * 32 // 2) * 4
    assert [row["micro_batches_held"] for row in rows] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("packing", "decoder.layers.0.self_attention"),
        ("shares", "decoder.layers.0.mlp"),
        ("groups", "embedding"),
    ],
)
def test_a_mistake_that_fits_every_shape_is_located(reports: dict[str, Report], name: str, part: str) -> None:
    report = reports[name]
    assert not report.good
    found = {finding.id: finding.message for finding in report.findings}
    assert found["rehearse.part"].startswith(part), report.findings
    assert "rehearse.loss" in found
    if name == "groups":
        assert "ranks [2, 3] are replicas and end with different weights" in found["rehearse.replicas"]


# ---- found before a process starts -------------------------------------------------------------------------


def problems(made: plan.Plan, folder: Path, topology: Topology | None = None) -> list[str]:
    report = Report(made)
    assert session.prepare(made, folder, report, topology) is None
    assert not folder.exists(), "nothing is written where nothing will run"
    return [finding.message for finding in report.findings if finding.severity == "problem"]


@pytest.mark.parametrize(
    ("pattern", "dim", "named"),
    [
        ("decoder.layers.{}.self_attention.linear_qkv.weight", 1, "column-parallel linear needs [48, 32]"),
        ("decoder.layers.{}.mlp.linear_fc2.weight", 0, "row-parallel linear needs [32, 32]"),
        ("decoder.layers.{}.self_attention.linear_proj.bias", 0, "needs [32], not cut"),
        ("embedding.word_embeddings.weight", None, "vocabulary-parallel table needs [40, 32]"),
    ],
)
def test_wrong_partition_dimension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, dim: int | None, named: str
) -> None:
    monkeypatch.setitem(rules._BY_PATTERN, pattern, replace(rules._BY_PATTERN[pattern], dim=dim))
    made = make_plan(tmp_path / "run", SPECS["gpt2"], "mp=2")
    (message,) = problems(made, tmp_path / "out")
    assert pattern.replace("{}", "*") in message
    assert named in message


def test_wrong_rank_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups transposed, and checkpoints transposed."""
    made = make_plan(tmp_path / "run", SPECS["gpt2"], "dp=2,mp=2")
    (message,) = problems(made, tmp_path / "out", TRANSPOSED)
    assert (
        "rank 1: its checkpoint is stage 0, replica 0, share 1, its groups make it stage 0, replica 1"
        in message
    )

    def place(self: layout.Grid, rank: int) -> Place:
        tensor, data = divmod(rank, self.data_parallel)
        return Place(0, data, tensor)

    monkeypatch.setattr(layout.Grid, "place", place)
    (message,) = problems(made, tmp_path / "out")
    assert "2 of 4 ranks are misplaced" in message


@pytest.mark.parametrize(
    ("grid", "options", "named"),
    [
        ("pp=2", {"offset": [1, 1]}, "sum of `offset` (2) should equal to remainder of `num_layers` (3)"),
        ("pp=2", {}, "sum of `offset` (0)"),
        ("pp=2", {"offset": [1, 0, 0]}, "should equal to `pp` (2), but got (3)"),
        ("pp=2", {"offset": [-2, 3]}, "negative layers"),
        ("pp=4", {}, "num_layers (3) < pp(4)"),
        ("pp=2", {"offset": [1, 0], "micro_batches": 1}, "size of micro_batch is 1"),
    ],
)
def test_layers_that_no_stage_can_hold(tmp_path: Path, grid: str, options: dict, named: str) -> None:
    messages = problems(make_plan(tmp_path / "run", SPECS["gpt2"], grid, **options), tmp_path / "out")
    assert any(named in message for message in messages), messages


def test_layers_on_no_stage_or_on_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint cut for other stages than the offset says."""
    made = make_plan(tmp_path / "run", SPECS["gpt2"], "pp=2", offset=[1, 0])
    monkeypatch.setattr(before, "stages_of", lambda spec, stages, offset: Stages(((0, 1), (1,)), True))
    (message,) = problems(made, tmp_path / "out")
    assert "num_layers 3, [2] are on no stage and [1] on several" in message
    stages = Stages(((0,), (1, 2)), True)
    (finding,) = before.against_layer_setting(stages, [[0, 1], [2]], [1, 0])
    assert "model_config.offset [1, 0]" in finding.message
    assert "[2, 1] layers, the checkpoint is cut for [1, 2]" in finding.message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 51}, "model_config.vocab_size 51 is no multiple of model_parallel 2"),
        ({"ffn_hidden_size": 63}, "model_config.ffn_hidden_size 63 is no multiple of model_parallel 2"),
        ({"max_position_embeddings": 17}, "model_config.max_position_embeddings 17 is no multiple"),
        (
            {"num_attention_heads": 3, "num_query_groups": 3, "hidden_size": 24},
            "model_config.num_attention_heads 3 is no multiple of model_parallel 2",
        ),
    ],
)
def test_sizes_that_do_not_divide(tmp_path: Path, changes: dict, named: str) -> None:
    spec = SPECS["gpt2"].model_copy(update=changes)
    messages = problems(make_plan(tmp_path / "run", spec, "mp=2"), tmp_path / "out")
    assert any(message.startswith(named) for message in messages), messages


def test_small_sizes_keep_what_divides_and_what_does_not() -> None:
    """GPT-2's 50257 rows do not divide by 2, and neither do the tiny model's."""
    full = gpt2_spec(
        vocab_size=50257, hidden_size=768, num_layers=12, num_attention_heads=12, num_query_groups=12,
        kv_channels=64, ffn_hidden_size=3072, max_position_embeddings=1024,
    )  # fmt: skip
    for ranks in (1, 2, 3, 4, 6):
        small = plan.shrunk(full, ranks)
        assert (small.num_layers, small.num_attention_heads) == (12, 12)
        assert small.hidden_size == small.num_attention_heads * small.kv_channels < 100
        for key in ("vocab_size", "ffn_hidden_size", "max_position_embeddings"):
            assert getattr(small, key) % ranks == getattr(full, key) % ranks
            assert getattr(small, key) < getattr(full, key)


def test_what_is_not_rehearsed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="128 processes"):
        make_plan(tmp_path / "run", SPECS["gpt2"], "dp=128")
    run = tiny.make_run(tmp_path / "virtual", changes={"model.model_config.pp_interleave_num": 2})
    with pytest.raises(UsageError, match="pp_interleave_num: found 2"):
        plan.make(RunDirectory.open(run), plan.Options())
    run = tiny.make_run(tmp_path / "context", changes={"parallel_config.context_parallel": 2})
    with pytest.raises(UsageError, match="context_parallel: found 2"):
        plan.make(RunDirectory.open(run), plan.Options())


def test_a_gradient_that_is_a_multiple_is_explained() -> None:
    grid = parse_grid("dp=3,mp=2")
    row = judge.KindError("k", 1.0, 2.0, "k, step 1")
    (finding,) = judge.gradient_findings([row], grid, 1)
    assert "model_parallel is 2: summed where it is whole already" in finding.cause
    (finding,) = judge.gradient_findings([replace(row, ratio=1 / 3)], grid, 1)
    assert "data_parallel is 3: a sum over them is missing" in finding.cause


# ---- the command -------------------------------------------------------------------------------------------


def test_the_command_says_what_it_found(tmp_path: Path) -> None:
    run = tiny.make_run(tmp_path / "run", spec=SPECS["llama"])
    done = run_cli("rehearse", run, "--strategy", "pp=2", "--steps", "1", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) == (0, "good"), done.stderr
    assert answer["errors"]["loss"] <= 1e-5
    assert [row["stage"] for row in answer["ranks"]] == [0, 1]
    done = run_cli("rehearse", run, "--strategy", "mp=4")
    assert done.returncode == 1
    assert "no process was started" in done.stdout
    assert "model_config.num_query_groups 2 is no multiple of model_parallel 4" in done.stderr
    assert run_cli("rehearse", run, "--strategy", "dp=2,xp=2").returncode == 2


FORGETFUL = """
from mindferry.launching.rank import main
from mindferry.rehearsal import cells, worker

{forget}

if __name__ == "__main__":
    main(worker.work)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("forget", "grid", "options", "found"),
    [
        (
            "cells.Norm.sums_over_tensor_group = lambda self: None",
            "mp=2",
            {"sequence": True},
            {"rehearse.copies": "layernorm", "rehearse.gradient": "layernorm"},
        ),
        (
            "from mindferry.rehearsal.wire import Wire; own = Wire.sum; "
            "Wire.sum = lambda self, name, x: x if name == 'tied' else own(self, name, x)",
            "pp=2",
            {"offset": [1, 0]},
            {"rehearse.copies": "embedding.word_embeddings.weight", "rehearse.checkpoint": "word_embeddings"},
        ),
        (
            "from mindferry.rehearsal.wire import Wire; own = Wire.sum; "
            "Wire.sum = lambda self, name, x: own(self, name, x) * (0.5 if name == 'data' else 1)",
            "dp=2",
            {},
            {"rehearse.gradient": "embedding.word_embeddings.weight"},
        ),
    ],
)
def test_ranks_that_forget_a_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: str, grid: str, options: dict, found: dict
) -> None:
    """The check itself on trial: ranks that compute wrongly, with every shape right and every output, too."""
    script = tmp_path / "forgetful.py"
    script.write_text(FORGETFUL.format(forget=forget))
    monkeypatch.setattr(session.worker, "__file__", str(script))
    report = session.rehearse(make_plan(tmp_path / "run", SPECS["gpt2"], grid, **options), tmp_path / "out")
    assert not report.good
    said = [(finding.id, finding.message) for finding in report.findings]
    for kind, name in found.items():
        assert any(kind == id and name in message for id, message in said), said
    if grid == "dp=2":
        causes = {finding.cause for finding in report.findings if finding.id == "rehearse.gradient"}
        assert "it is 0.5 times the right one, and data_parallel is 2: a sum over them is missing" in causes


def test_the_strategy_of_another_yaml(tmp_path: Path) -> None:
    """run.cluster.yaml states it; run.yaml does not."""
    run = tiny.make_run(tmp_path / "run", spec=SPECS["gpt2"])
    content = yaml.safe_load((run / "run.yaml").read_text())
    content["parallel_config"] |= {"model_parallel": 2, "pipeline_stage": 3, "micro_batch_num": 6}
    other = tmp_path / "run.cluster.yaml"
    other.write_text(yaml.safe_dump(content))
    made = plan.make(RunDirectory.open(run), plan.Options(yaml=other))
    assert made.grid == parse_grid("mp=2,pp=3")
    assert made.micro_batches == 6
    assert plan.make(RunDirectory.open(run), plan.Options()).grid.ranks == 1


@pytest.mark.long
def test_eight_processes_all_three_ways(tmp_path: Path) -> None:
    made = make_plan(tmp_path / "run", SPECS["gpt2"], "dp=2,mp=2,pp=2", offset=[0, 1], sequence=True)
    report = session.rehearse(made, tmp_path / "out")
    assert [f.message for f in report.findings if f.severity == "problem"] == []
    assert max(row.error for row in report.gradients) <= 1e-5
    assert len({row["parameters"] for row in report.ranks}) == 2


@pytest.mark.long
def test_full_scale_is_the_runs_own_sizes_and_weights(tmp_path: Path) -> None:
    made = make_plan(tmp_path / "run", SPECS["gpt2"], "mp=2", scale="full")
    assert made.spec == made.full
    report = session.rehearse(made, tmp_path / "out")
    assert report.good, report.findings


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_dead_rank_leave_no_process(tmp_path: Path, number: int) -> None:
    import psutil

    run = tiny.make_run(tmp_path / "run", spec=SPECS["llama"])
    command = [
        sys.executable,
        "-m",
        "mindferry",
        "rehearse",
        str(run),
        "--strategy",
        "dp=2",
        "--steps",
        "1000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = run / "logs/rehearse/gradients-3.rank-0.safetensors"
    deadline = time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    victim = int((run / "logs/rehearse/job/rank-1.pid").read_text())
    os.kill(process.pid if number == signal.SIGINT else victim, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 1)
    if number == signal.SIGKILL:
        assert "rank 1 of 2" in err
    time.sleep(1.0)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]
    assert left == []


def test_a_merged_checkpoint_is_the_whole_one(tmp_path: Path) -> None:
    """Cut and merged without training: bit for bit."""
    made = make_plan(tmp_path / "run", SPECS["gpt2"], "dp=2,mp=2,pp=2", offset=[1, 0])
    case = session.prepare(made, tmp_path / "out", Report(made))
    assert case is not None
    whole, differing = checkpoints.merge(made, case.stages, tmp_path / "out/start", checkpoints.FIRST)
    assert differing == []
    assert whole.keys() == case.weights.keys()
    assert all(whole[name].tobytes() == value.tobytes() for name, value in case.weights.items())
