"""A rehearsal from plan to verdict: weights cut, ranks run, one process run, both compared."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.findings import Finding
from mindferry.launching.msrun import Job
from mindferry.partition.layout import Stages
from mindferry.partition.rules import Cut, cuts
from mindferry.rehearsal import before, checkpoints, judge, reference, trace, worker
from mindferry.rehearsal.judge import KindError
from mindferry.rehearsal.plan import Plan
from mindferry.rehearsal.stage import Cutting
from mindferry.rehearsal.topology import Topology
from mindferry.weights.target import target_names

LEARNING_RATE = 0.1
MASKED = 0.1


@dataclass
class Report:
    """What a rehearsal found.

    Attributes:
        ranks: one row a rank: its place, what it held, what it sent. Empty when no process was started.
        loss_error, grad_norm_error: largest relative error over the steps.
        gradients: one row a kind of parameter.
        weights_error: of the weights after the last step, merged; as KindError.error.
        losses: of each step, cut and in one process.
    """

    plan: Plan
    findings: list[Finding] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    loss_error: float | None = None
    grad_norm_error: float | None = None
    gradients: list[KindError] = field(default_factory=list)
    weights_error: float | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not any(finding.severity == "problem" for finding in self.findings)


@dataclass
class Case:
    """A plan made ready for its ranks.

    Attributes:
        weights: whole parameters.
        ids, mask: tokens of each [step, micro-batch, sequence].
    """

    plan: Plan
    folder: Path
    topology: Topology
    stages: Stages
    cuts: Mapping[str, Cut]
    weights: dict[str, np.ndarray]
    ids: np.ndarray
    mask: np.ndarray

    def request(self) -> dict[str, Any]:
        """What the ranks are told."""
        plan = self.plan
        return {
            "folder": str(self.folder),
            "spec": plan.spec.model_dump(mode="json"),
            "packing": {"qkv": plan.layout.qkv, "gate_up": plan.layout.gate_up},
            "topology": vars(self.topology),
            "layers": [list(layers) for layers in self.stages.layers],
            "cut": [name for name, cut in self.cuts.items() if cut.dim is not None],
            "frozen": sorted(plan.frozen),
            "start": [self._file("start", rank, checkpoints.FIRST) for rank in range(plan.grid.ranks)],
            "end": [self._file("end", rank, self.last) for rank in range(plan.grid.ranks)],
            "writes_gradients": self.first_replica,
            "sequence": self.sequence,
            "seq_length": plan.seq_length,
            "steps": plan.steps,
            "per_token": plan.per_token,
            "learning_rate": LEARNING_RATE,
            "clip": plan.clip,
        }

    @property
    def sequence(self) -> bool:
        """Whether activations are shared along the sequence."""
        return self.plan.sequence and self.plan.grid.model_parallel > 1

    @property
    def first_replica(self) -> list[int]:
        """Ranks whose checkpoints make one whole model."""
        grid = self.plan.grid
        return [rank for rank in range(grid.ranks) if grid.place(rank).data == 0]

    @property
    def last(self) -> str:
        """Epoch and step of the checkpoint that the ranks write."""
        return f"1_{self.plan.steps}"

    def _file(self, kind: str, rank: int, suffix: str) -> str:
        return str(checkpoints.rank_file(self.folder / kind, self.plan.spec, rank, suffix))


def rehearse(plan: Plan, folder: Path, on_stage: Callable[[str], None] = lambda stage: None) -> Report:
    """Rehearse `plan`; `folder` is for what ranks and processes leave, and is emptied first.

    Raises:
        UsageError: run.yaml or the weights of the run cannot be used.
        MindferryError: a rank died; the message is its own.
    """
    report = Report(plan)
    case = prepare(plan, folder, report)
    if case is None:
        return report
    on_stage(f"{plan.grid.ranks} processes")
    results = run([case], folder)[0]
    on_stage("one process")
    judged(case, results, report)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    for kind in ("start", "end", "again"):
        shutil.rmtree(folder / kind, ignore_errors=True)
    return report


def prepare(plan: Plan, folder: Path, report: Report, topology: Topology | None = None) -> Case | None:
    """Check `plan` and write what its ranks read; None, with findings, where the strategy cannot work.

    Args:
        topology: other communication groups than MindSpore's, to rehearse a mistake.
    """
    grid = plan.grid
    topology = topology or Topology.of(grid.data_parallel, grid.model_parallel, grid.pipeline_stage)
    report.findings += before.settings(plan)
    if not report.good:
        return None
    stages, findings = before.stage_layers(plan)
    report.findings += findings + before.groups(plan, topology) + before.shares(plan)
    if stages is None or not report.good:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ids, mask = _tokens(plan)
    table = cuts(plan.spec, plan.layout, grid.model_parallel)
    case = Case(plan, folder, topology, stages, table, _weights(plan), ids, mask)
    _write(case)
    return case


def _tokens(plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """ids [steps, micro-batches, sequences, seq_length + 1] int32 and mask int32, a tenth of it 0.

    An uneven mask tells a mean over tokens from a mean over replicas.
    """
    rng = np.random.default_rng(plan.seed)
    shape = (plan.steps, plan.micro_batches, plan.batch_size * plan.grid.data_parallel, plan.seq_length)
    ids = rng.integers(0, plan.spec.vocab_size, (*shape[:3], shape[3] + 1), dtype=np.int32)
    mask = (rng.random(shape) >= MASKED).astype(np.int32)
    mask[..., 0] = 1
    return ids, mask


def _weights(plan: Plan) -> dict[str, np.ndarray]:
    """The run's own weights at full scale, drawn ones otherwise.

    Drawn norms and biases are no ones and zeros: a bias added twice or a norm left out must show.
    """
    if plan.scale == "full":
        from mindferry.training.weights_check import open_model

        store = open_model(plan.run.model)
        return {name: np.array(store.read(name), np.float32) for name in target_names(plan.spec)}
    rng = np.random.default_rng(plan.seed + 1)
    drawn = {}
    for name, shape in target_names(plan.spec).items():
        noise = rng.standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            drawn[name] = noise * np.float32(0.5 / np.sqrt(shape[-1]))
        else:
            scale = name.endswith((".gamma", "layernorm.weight"))
            drawn[name] = np.float32(scale) + np.float32(0.1) * noise
    return {name: np.zeros_like(value) if name in plan.frozen else value for name, value in drawn.items()}


def _write(case: Case) -> None:
    np.savez(case.folder / "tokens.npz", ids=case.ids, mask=case.mask)
    checkpoints.cut(case.plan, case.stages, case.weights, case.folder / "start")


def run(cases: Sequence[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """Start the ranks once for all `cases` (of equally many ranks); what each rank measured, [case][rank].

    Raises:
        MindferryError: a rank died; the message is its own.
    """
    job = Job(Path(worker.__file__), folder / "job", cases[0].plan.grid.ranks)
    results = job.run({"cases": [case.request() for case in cases]})
    return [[result["cases"][number] for result in results] for number in range(len(cases))]


def judged(case: Case, results: Sequence[dict[str, Any]], report: Report) -> Report:
    """Run one process and compare; completes `report`."""
    plan = case.plan
    with _empty_directory(case.folder / "engine"):
        single = reference.run(plan, case.weights, case.ids, case.mask, LEARNING_RATE)
    expected = [case.topology.of_rank(rank) for rank in range(plan.grid.ranks)]
    report.findings += judge.meetings(results, expected)
    report.findings += _first_difference(case, results, single.losses[0])
    report.findings += before.against_layer_setting(case.stages, single.layers, plan.offset)
    steps, findings = _gradients(case)
    report.findings += findings
    report.gradients = judge.gradient_errors(steps, single.gradients)
    report.loss_error, report.grad_norm_error, findings = judge.losses(results, single)
    report.losses = list(zip(results[0]["losses"], single.losses, strict=True))
    report.findings += judge.gradient_findings(report.gradients, plan.grid, plan.micro_batches) + findings
    report.findings += judge.replicas(results, case.topology.data)
    _checkpoints(case, single.weights, report)
    report.ranks = [_row(case, rank, result) for rank, result in enumerate(results)]
    return report


def _first_difference(case: Case, results: Sequence[dict[str, Any]], reference_loss: float) -> list[Finding]:
    plan = case.plan
    loss, whole = trace.uncut(
        Cutting(plan.spec, plan.layout, False, plan.seq_length),
        case.weights,
        case.ids[0],
        case.mask[0],
        plan.per_token,
        plan.grid.data_parallel,
    )
    first = [
        (case.topology.position(rank)[0], result)
        for rank, result in enumerate(results)
        if case.topology.position(rank)[1] == 0
    ]
    return trace.uncut_finding(loss, reference_loss) or trace.first_difference(first, whole, case.sequence)


@contextmanager
def _empty_directory(path: Path) -> Iterator[None]:
    """MindSpore leaves files in the working directory."""
    import os

    before_that = os.getcwd()
    path.mkdir(parents=True, exist_ok=True)
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before_that)


def _gradient_files(case: Case, step: int) -> dict[int, dict[str, np.ndarray]]:
    """Rank -> name -> its part of the gradient, for the ranks of the first replica."""
    from safetensors.numpy import load_file

    return {
        rank: load_file(case.folder / f"gradients-{step}.rank-{rank}.safetensors")
        for rank in case.first_replica
    }


def _gradients(case: Case) -> tuple[list[dict[str, np.ndarray]], list[Finding]]:
    """The whole gradients of each step; copies that should be alike and are not."""
    steps, found = [], {}
    for step in range(case.plan.steps):
        shares = _gradient_files(case, step)
        whole = {}
        for name, cut in case.cuts.items():
            if name in case.plan.frozen:
                continue
            whole[name], alike = judge.merged(name, cut, case.stages.of(name), case.plan.grid, shares)
            if not alike:
                kind = judge.kind_of(name)
                found[kind] = Finding(
                    "rehearse.copies",
                    "problem",
                    f"{name}, step {step + 1}: ranks that hold the same parameter have different gradients",
                    cause="a sum over the tensor group, or over both ends of a tied table, is missing",
                )
        steps.append(whole)
    return steps, list(found.values())


def _checkpoints(case: Case, expected: Mapping[str, np.ndarray], report: Report) -> None:
    """Merge the ranks' checkpoint, compare it with one process' weights, and cut it again bit for bit."""
    plan, end, again = case.plan, case.folder / "end", case.folder / "again"
    try:
        whole, differing = checkpoints.merge(plan, case.stages, end, case.last)
        checkpoints.cut(plan, case.stages, whole, again)
    except MindferryError as err:
        problem = Finding("rehearse.checkpoint", "problem", err.message, err.cause, err.remedy)
        report.findings.append(problem)
        return
    for text in differing:
        report.findings.append(Finding("rehearse.checkpoint", "problem", text))
    odd = checkpoints.same(plan, (end, case.last), (again, checkpoints.FIRST))
    if odd and not differing:
        report.findings.append(
            Finding(
                "rehearse.checkpoint",
                "problem",
                f"merging the ranks' checkpoint and cutting it again gives other files for ranks {odd}",
            )
        )
    errors = [
        float(np.abs(whole[name] - value).max()) / max(float(np.abs(value).max()), 1e-12)
        for name, value in expected.items()
    ]
    report.weights_error = max(errors) if np.isfinite(errors).all() else float("inf")
    if report.weights_error > judge.TOLERANCE:
        report.findings.append(
            Finding(
                "rehearse.weights",
                "problem",
                f"weights after step {plan.steps}, merged: off by {report.weights_error:.1e} of the largest "
                f"element, expected at most {judge.TOLERANCE:g}",
            )
        )


def _row(case: Case, rank: int, result: Mapping[str, Any]) -> dict[str, Any]:
    stage, replica, share = case.topology.position(rank)
    return {
        "rank": rank,
        "stage": stage,
        "replica": replica,
        "share": share,
        "layers": list(case.stages.layers[stage]),
        "parameters": result["parameters"],
        "micro_batches_held": result["in_flight"],
        "bytes": result["bytes"],
        "calls": result["calls"],
        "seconds": result["seconds"],
    }
