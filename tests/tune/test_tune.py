"""tune on a tiny real run: a planted harm is reverted, a stopped tuning goes on, and the rule by which it decides."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mindferry.checking import convergence, speed
from mindferry.checking.curves import Curve
from mindferry.errors import MindferryError, UsageError
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory
from mindferry.tuning import changes, session
from mindferry.tuning.changes import CHANGES, WORKERS, Change
from tests.support import make_run, make_source, run_cli

STEPS = 8


@pytest.fixture
def run(tiny, tmp_path) -> RunDirectory:
    ignored = shutil.ignore_patterns("logs", "*.jsonl", "bench.json", "run.tuned.yaml")
    shutil.copytree(tiny / "run", tmp_path / "run", ignore=ignored)
    return RunDirectory(tmp_path / "run")


def test_a_planted_harm_is_reverted(run, monkeypatch):
    monkeypatch.setattr(session, "CHANGES", ())
    planted = Change("planted", lambda content: {"lr_schedule.learning_rate": 0.5})
    # Starts compiled, which is quicker to measure than eager.
    monkeypatch.setattr(session, "smallest", lambda content: {"context.mode": 0})
    done = session.Session(run, session.Plan(STEPS, 600, extra=[planted])).tune()
    assert [record["decision"] for record in done.records] == ["start", "reverted"]
    assert done.records[1]["convergence"] in ("slower", "diverged", "oscillating")
    assert done.kept == {"context.mode": 0}
    assert run_yaml.read(run.root / "run.tuned.yaml")["lr_schedule"]["learning_rate"] == pytest.approx(1e-3)


@pytest.mark.long
def test_keeps_what_helps_and_reverts_what_hurts(run, monkeypatch):
    """Eager to compiled must be kept; a ruinous learning rate planted after it must not."""
    monkeypatch.setattr(session, "CHANGES", CHANGES[:1])
    planted = Change("planted", lambda content: {"lr_schedule.learning_rate": 0.5})
    before = run.yaml.read_text()
    done = session.Session(run, session.Plan(STEPS, 600, extra=[planted])).tune()
    decisions = {record["change"]: record for record in done.records}
    assert decisions["smallest configuration"]["decision"] == "start"
    assert decisions["compiled graphs"]["decision"] == "kept"
    assert decisions["planted"]["decision"] == "reverted"
    assert decisions["planted"]["convergence"] in ("slower", "diverged", "oscillating")
    assert done.kept["context.mode"] == 0
    assert "lr_schedule.learning_rate" not in done.kept
    result = decisions["all kept changes against the start"]
    assert result["ratio"] > 1
    assert result["convergence"] == "same"
    tuned = run_yaml.read(run.root / "run.tuned.yaml")
    assert tuned["context"]["mode"] == 0
    assert tuned["lr_schedule"]["learning_rate"] == pytest.approx(1e-3)
    assert run.yaml.read_text() == before
    assert "# Training run for MindSpore Transformers" in (run.root / "run.tuned.yaml").read_text()


def records(*extra):
    first = {"change": "smallest configuration", "decision": "start", "overrides": {"context.mode": 1},
             "steps": STEPS, "losses": [3.0] * STEPS, "peak_memory_bytes": 1, "why": ""}  # fmt: skip
    return [first, *extra]


def written(run, rows, torn=""):
    opened = session.Session(run, session.Plan(STEPS), restart=True)
    rows[0]["run_yaml"] = opened._mark
    (run.root / "tune.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)


def test_resumes_after_a_kill_and_skips_what_was_tried(run):
    kept = {"change": "compiled graphs", "decision": "kept", "overrides": {"context.mode": 0}, "peak_memory_bytes": 1,
            "why": ""}  # fmt: skip
    written(run, records(kept), torn='{"change": "layer sp')
    again = session.Session(run, session.Plan(STEPS, budget_seconds=0))
    assert again.kept == {"context.mode": 0}
    done = again.tune()
    assert done.ended == "budget"
    assert [record["change"] for record in done.records] == ["smallest configuration", "compiled graphs"]
    assert run_yaml.read(run.root / "run.tuned.yaml")["context"]["mode"] == 0


def test_a_changed_run_yaml_is_not_continued(run):
    written(run, records())
    run.yaml.write_text(run.yaml.read_text() + "\n# edited\n")
    with pytest.raises(UsageError, match=r"another run\.yaml"):
        session.Session(run, session.Plan(STEPS))
    assert session.Session(run, session.Plan(STEPS), restart=True).records == []


def test_nothing_is_tuned_when_the_loss_does_not_fall(run, monkeypatch):
    from mindferry.checking import bench

    def rising(tasks, rounds, folder, tick, parts):
        return {
            name: bench.Side(name, {"step": [0.1] * rounds}, losses=list(np.linspace(1, 2, rounds)))
            for name in tasks
        }

    monkeypatch.setattr(bench, "measure", rising)
    with pytest.raises(MindferryError, match="does not fall"):
        session.Session(run, session.Plan(STEPS)).tune()
    assert not (run.root / "tune.jsonl").exists()


def curve(values):
    return Curve("", "", np.arange(1, len(values) + 1), {"loss": np.asarray(values, float)})


def test_the_rule():
    base = np.linspace(3, 2, 16)
    same, parted = (convergence.compare(curve(base), curve(base + x)) for x in (0, 0.5))
    better = convergence.compare(curve(base), curve(base - 0.5))
    fast = speed.judge(np.full(16, 0.2), np.full(16, 0.1), interleaved=True)
    slow = speed.judge(np.full(16, 0.1), np.full(16, 0.2), interleaved=True)
    even = speed.judge(np.full(16, 0.1), np.full(16, 0.1), interleaved=True)
    assert session.decide(fast, "same", same, False)[0]
    assert session.decide(even, "less", same, False)[0]
    assert session.decide(slow, "less", same, True)[0]
    assert not session.decide(slow, "less", same, False)[0]
    assert not session.decide(even, "same", same, False)[0]
    # However fast: a curve that parts, for the worse or the better, is not kept.
    assert not session.decide(fast, "less", parted, False)[0]
    assert not session.decide(fast, "less", better, False)[0]


def test_what_hides_in_noise_is_measured_once_more(run, monkeypatch):
    """A step twice as fast, first under noise of a factor of three, then on a calm machine: measured twice, kept."""
    from mindferry.checking import bench

    rng = np.random.default_rng(3)
    calls = []

    def measured(tasks, rounds, folder, tick, parts):
        calls.append(list(tasks))
        spread = 1.2 if len(calls) == 2 else 0.01
        losses = list(np.linspace(3, 2, rounds))
        return {
            name: bench.Side(
                name,
                {"step": list((0.1 if name == "changed" else 0.2) * rng.lognormal(0, spread, rounds))},
                losses=losses,
                peak_memory_bytes=1 << 30,
            )
            for name in tasks
        }

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(session, "CHANGES", CHANGES[:1])
    done = session.Session(run, session.Plan(24, 600)).tune()
    assert calls == [["start"], ["current", "changed"], ["current", "changed"], ["start", "tuned"]]
    tried = done.records[1]
    assert tried["decision"] == "kept", tried
    assert 1.5 < tried["ratio"] < 3


def test_every_change_proposes_keys_of_run_yaml_or_says_why_not(run):
    content = run_yaml.read(run.yaml)
    start = session.changed(content, changes.smallest(content))
    for device in ("CPU", "Ascend"):
        start["context"]["device_target"] = device
        for change in CHANGES:
            proposal = change.propose(start)
            if isinstance(proposal, str):
                assert proposal
            else:
                after = session.changed(start, proposal)
                # Proposed once, a change is never proposed again.
                assert isinstance(change.propose(after), str) or change.name.startswith("accumulation"), (
                    change.name
                )


def test_processes_share_the_batch_where_it_divides(run, monkeypatch):
    propose = {change.name: change.propose for change in CHANGES}
    content = session.changed(run_yaml.read(run.yaml), {})
    monkeypatch.setattr(changes.os, "sched_getaffinity", lambda pid: set(range(6)))
    # Four sequences a step: four processes, not six and not five.
    assert propose["parallel strategy"](content) == {WORKERS: 4}
    assert "nobody to share" in propose["optimizer-state sharding"](content)
    content["runner_config"].update(batch_size=1, gradient_accumulation_steps=6)
    assert propose["parallel strategy"](content) == {WORKERS: 6}
    content["runner_config"]["gradient_accumulation_steps"] = 1
    assert "nothing to share" in propose["parallel strategy"](content)
    several = session.changed(content, {WORKERS: 4})
    assert propose["parallel strategy"](several) == "4 processes already"
    assert propose["optimizer-state sharding"](several) == {"parallel.enable_parallel_optimizer": True}


@pytest.fixture(scope="module")
def smooth(tiny, tmp_path_factory) -> RunDirectory:
    """A run without dropout, whose processes would draw masks of their own."""
    root = tmp_path_factory.mktemp("smooth")
    make_source(root / "src", embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
    return RunDirectory(make_run(root / "src", tiny / "corpus", root / "run"))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_processes_and_sharding_are_real_trials(smooth, monkeypatch):
    """Two processes, then shared moments: measured in turns with what was kept before, on the losses of one."""
    names = ("parallel strategy", "optimizer-state sharding")
    monkeypatch.setattr(session, "CHANGES", [change for change in CHANGES if change.name in names])
    monkeypatch.setattr(session, "smallest", lambda content: {"context.mode": 0})
    judged = []

    def keep(times, kept_memory, curve, short):
        judged.append((times, kept_memory, curve))
        return True, "kept by the test"

    monkeypatch.setattr(session, "decide", keep)
    done = session.Session(smooth, session.Plan(STEPS, 3000)).tune()
    assert [record["decision"] for record in done.records] == ["start", "kept", "kept", "result"]
    assert done.kept == {"context.mode": 0, WORKERS: 2, "parallel.enable_parallel_optimizer": True}
    for times, _, curve in judged:
        np.testing.assert_allclose(curve.candidate, curve.reference, rtol=1e-5)
        assert min(times.reference_median, times.candidate_median) > 0
    first, second = done.records[1:3]
    assert (first["current_processes"], first["processes"]) == (1, 2)
    assert (second["current_processes"], second["processes"]) == (2, 2)
    assert first["peak_memory_bytes"] > 100 << 20
    text = (smooth.root / "run.tuned.yaml").read_text()
    assert text.startswith("# Tuned for: mindferry train RUN --workers 2\n")
    assert run_yaml.read(smooth.root / "run.tuned.yaml")["parallel"]["enable_parallel_optimizer"] is True


def test_the_command_tells_a_finished_tuning(run):
    """Nothing is left to try: the answer comes from tune.jsonl, the number of processes beside run.tuned.yaml."""
    names = [change.name for change in CHANGES if change.name != "parallel strategy"]
    last = "all kept changes against the start"
    rows = records(
        *({"change": name, "decision": "not tried", "overrides": {}, "why": "no"} for name in names),
        {"change": "parallel strategy", "decision": "kept", "overrides": {WORKERS: 2}, "why": "",
         "peak_memory_bytes": 1},
        {"change": last, "decision": "result", "overrides": {}, "ratio": 3.5, "why": ""},
    )  # fmt: skip
    written(run, rows)
    done = run_cli("tune", run.root, "--steps", STEPS, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (answer["ended"], answer["workers"], answer["ratio"]) == ("done", 2, 3.5)
    assert answer["kept"] == {"context.mode": 1, WORKERS: 2}
    assert answer["changes"][-1]["decision"] == "result"
    assert "losses" not in answer["changes"][0]
    assert "--workers 2" in (run.root / "run.tuned.yaml").read_text().splitlines()[0]
    assert "train it with --workers 2" in run_cli("tune", run.root, "--steps", STEPS).stdout


def test_wrong_keys(run):
    done = run_cli("tune", run.root, "--try", "context.moed=1")
    assert done.returncode == 2
    assert "did you mean 'mode'" in done.stderr
    assert run_cli("tune", run.root, "--try", "context.mode").returncode == 2


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_the_demo_run_ends_three_times_faster(tmp_path):
    from mindferry.demo import source

    source.build(tmp_path / "gpt2", steps=20)
    source.write_corpus(tmp_path / "corpus")
    made = run_cli("migrate", tmp_path / "gpt2", "--data", tmp_path / "corpus", "--out", tmp_path / "run",
                   "--seq-length", "128", "--batch-size", "4", "--steps", "100", "--learning-rate", "5e-4")  # fmt: skip
    assert made.returncode == 0, made.stderr
    run = RunDirectory(tmp_path / "run")
    done = session.Session(run, session.Plan(16, 3600)).tune()
    result = next(record for record in done.records if record["decision"] == "result")
    assert result["ratio"] >= 3
    assert result["convergence"] == "same"
