"""doctor comm: real jobs of two processes with a fault in one, and what is made of the numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mindferry.diagnosis.communication import judge, measure, probe
from mindferry.diagnosis.communication.examine import confirmed, examine, exchange_of, from_record
from mindferry.errors import UsageError
from mindferry.targets.run_directory import RunDirectory

from ..support import make_run, make_source, run_cli

FAULTY = Path(__file__).parent / "faulty_rank"
STEPS = 14


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("comm")
    source = make_source(folder / "gpt2", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    return RunDirectory.open(make_run(source, corpus, folder / "run", accumulation=2))


@pytest.mark.parametrize(
    ("fault", "overrides", "culprit"),
    [
        ("", {}, ""),
        ("sleep", {}, "comm.slow-rank"),
        ("tokens", {}, "comm.more-tokens"),
        ("data", {}, "comm.slow-data"),
        ("", {"runner_wrapper.reduce_every_micro_batch": True}, "comm.too-often"),
    ],
)
def test_the_planted_fault_is_named(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, fault: str, overrides: dict, culprit: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAULTY))
    monkeypatch.setenv("FAULT", fault)
    trials, exchange = measure.Trials(run, STEPS), exchange_of(run, 2)
    measured = confirmed(trials, trials.parallel(2, overrides), exchange, overrides)
    found = judge.causes(measured, exchange)
    problems = [cause for cause in found if cause.finding.severity == "problem"]
    assert [cause.finding.id for cause in problems] == [culprit] * bool(culprit), [str(c) for c in found]
    if fault:
        assert problems[0].finding.message.startswith("rank 1 keeps the others waiting")
        assert measured.ranks[1].slowest > 0.7
    for split in measured.ranks:
        assert sum(getattr(split, part) for part in measure.PARTS) == pytest.approx(split.step, rel=1e-6)
    if culprit == "comm.too-often":
        (remedy,) = problems[0].remedies
        assert remedy.overrides == {"runner_wrapper.reduce_every_micro_batch": False}
        assert measured.ranks[0].reductions == 2
        assert remedy.predicted == pytest.approx(measured.step - measured.mean("collective") / 2)


def test_a_process_that_was_slow_once_is_not_blamed() -> None:
    def of(*slow: float) -> measure.Scaling:
        ranks = [
            measure.Split(
                r, 0.1, 0.0, own, max(slow) - own, 0.01, 0.0, 0.0, 64.0, 1.0, float(own == max(slow))
            )
            for r, own in enumerate(slow)
        ]
        return measure.Scaling(2, tuple(ranks), 14, 0.1, 0.05)

    class Replayed:
        def __init__(self, again: measure.Scaling) -> None:
            self.again = again

        def parallel(self, *_: object) -> measure.Scaling:
            return replace(self.again, alone=None, alone_compute=None)

    exchange, first = judge.Exchange(4 * 1000), of(0.05, 0.09)
    assert judge.blamed(judge.causes(first, exchange)) == ("comm.slow-rank", 1)
    assert confirmed(Replayed(of(0.05, 0.09)), first, exchange) is first
    calm = of(0.0501, 0.05)
    assert confirmed(Replayed(calm), first, exchange) == calm, "with what one process took, from the first"
    assert judge.blamed(judge.causes(confirmed(Replayed(of(0.09, 0.05)), first, exchange), exchange)) != (
        "comm.slow-rank",
        1,
    )


def test_the_command(run: RunDirectory, tmp_path: Path) -> None:
    done = run_cli("doctor", "comm", run.root, "--workers", "2", "--steps", "8", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == (1 if answer["culprit"] else 0)
    (two,) = answer["scalings"]
    assert two["workers"] == 2
    assert two["alone_seconds"] > 0
    # 4 sequences in each of 2 micro-batches, of 32 tokens, for two.
    assert [rank["tokens"] for rank in two["ranks"]] == [4 * 2 * 32 / 2] * 2
    assert answer["collective"]["bytes_per_second"] > 1e6
    assert set(two["parts"]) == set(measure.PARTS)
    assert not (run.root / "checkpoints").exists(), "the run is only read"


@pytest.mark.long
def test_remedies_are_measured_on_request(run: RunDirectory, tmp_path: Path) -> None:
    """With an AllReduce every micro-batch, the remedy that comes out is tried, and the table says what it brought."""
    from mindferry.diagnosis.loss.rerun import scratch_of

    content = yaml.safe_load(run.yaml.read_text())
    content["runner_wrapper"]["reduce_every_micro_batch"] = True
    with scratch_of(run) as scratch:
        (scratch.run.root / "run.yaml").write_text(yaml.safe_dump(content))
        done = examine(scratch.run, scratch.run, [2], 8, try_remedies=True)
    first = done.tried[0]
    assert first.remedy.name == "average once a step"
    assert first.after > 0
    assert len(done.tried) == len(done.remedies)


def test_a_record_is_judged_without_training(tmp_path: Path, run: RunDirectory) -> None:
    with pytest.raises(UsageError, match="no several processes have trained it"):
        from_record(RunDirectory.open(_copy(run, tmp_path / "never")))
    recorded = RunDirectory.open(_copy(run, tmp_path / "two"))
    _write(
        recorded,
        [_line(step, wait=0.06) for step in range(1, 13)],
        [_line(step, compute=0.08) for step in range(1, 13)],
    )
    done = from_record(recorded)
    assert done.culprit == "comm.slow-rank"
    assert done.scalings[0].ranks[0].wait == pytest.approx(0.059)
    (recorded.root / "logs/metrics.rank_2.jsonl").write_text("{torn")
    with pytest.raises(UsageError, match="3 ranks have 0 steps in common"):
        from_record(recorded)


def test_a_missing_rank_is_named(tmp_path: Path, run: RunDirectory) -> None:
    root = _copy(run, tmp_path / "run")
    _write(RunDirectory.open(root), [_line(1)], [_line(1)])
    with pytest.raises(UsageError, match=r"metrics\.rank_2\.jsonl: no such file: rank 2 of 3"):
        measure.scaling(root, 3)


def _copy(run: RunDirectory, out: Path) -> Path:
    import shutil

    return Path(shutil.copytree(run.root, out, ignore=shutil.ignore_patterns("logs", "metrics.jsonl")))


def _line(step: int, wait: float = 0.001, compute: float = 0.02) -> str:
    """A record whose step is the sum of its parts: 10 ms of reduction, 5 of update, 1 of data, 1 between."""
    whole = compute + wait + 0.010 + 0.005
    record = {
        "step": step, "data_time": 0.001, "compute_time": whole, "step_time": whole + 0.002, "tokens": 64,
        "forward_backward_time": compute, "wait_time": wait, "reduce_time": 0.010, "reductions": 1,
    }  # fmt: skip
    return json.dumps(record)


def _write(run: RunDirectory, *ranks: list[str]) -> None:
    run.logs.mkdir(exist_ok=True)
    for rank, lines in enumerate(ranks):
        measure.rank_file(run.root, rank).write_text("\n".join(lines) + "\n")


@given(waits=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=5, max_size=40))
def test_parts_sum_to_the_step_and_the_last_never_waits(waits: list[list[float]]) -> None:
    meeting = np.array(waits).T
    ranks, steps = meeting.shape
    fixed = {"data_time": 0.1, "forward_backward_time": 0.5, "reduce_time": 0.2, "tokens": 8, "reductions": 1}
    computing = 0.5 + meeting + 0.2 + 0.05
    columns = {"step_time": computing + 0.1 + 0.01, "compute_time": computing, "wait_time": meeting}
    fields = [np.broadcast_to(columns.get(f, fixed.get(f, 0)), (ranks, steps)) for f in measure._FIELDS]
    for split in measure._splits(np.stack(fields, 2)):
        assert sum(getattr(split, part) for part in measure.PARTS) == pytest.approx(split.step)
        assert split.wait >= 0
        assert split.update == pytest.approx(0.05)


def test_chance_is_the_binomial_tail() -> None:
    assert judge.by_chance(1.0, 1, 2) == 1.0
    assert judge.by_chance(1.0, 10, 2) == pytest.approx(2 / 2**10)
    assert judge.by_chance(0.9, 10, 2) == pytest.approx(2 * 11 / 2**10)
    assert judge.by_chance(0.25, 100, 4) > 0.5


def test_a_collective_is_a_line() -> None:
    line = probe.fitted(2, {4: 1e-3, 4_000_004: 5e-3})
    assert line.seconds(0) == pytest.approx(1e-3)
    assert line.seconds(4e6) == pytest.approx(5e-3)
    assert line.seconds(4e6, pieces=3) == pytest.approx(7e-3)


def test_small_buckets_are_an_unsuitable_collective() -> None:
    split = measure.Split(0, 0.1, 0.001, 0.02, 0.0, 0.07, 0.008, 0.001, 64, 1, 0.5)
    measured = measure.Scaling(2, (split, split), 10)
    exchange = judge.Exchange(gradient_bytes=4_000_000, pieces=50)
    found = judge.causes(measured, exchange, probe.Collective(2, 1e-3, 1e9))
    assert found[0].finding.id == "comm.small-buckets"
    assert found[0].seconds == pytest.approx(0.07 - 0.005)
    assert found[0].remedies[0].overrides == {
        "parallel.comm_fusion": {"allreduce": {"mode": "size", "config": 64}}
    }
