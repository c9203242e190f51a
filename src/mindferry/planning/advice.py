"""Stages that bring a plan up one kind of parallelism at a time: pure data parallel, then model, then
pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from mindferry.planning.estimate import Estimate, Estimator, Job
from mindferry.planning.search import Fixed, job_with_batch, search
from mindferry.planning.strategy import Strategy


@dataclass(frozen=True)
class Stage:
    """One step on the way.

    Attributes:
        name: "data parallel", "model parallel", "pipeline".
        job: the job of this stage; its model may be a shallow one where the full one does not fit yet.
        estimate: what to run.
        verify: what to see before the next stage.
        note: why this stage differs from the plan, if it does.
    """

    name: str
    job: Job
    estimate: Estimate
    verify: tuple[str, ...]
    note: str = ""


_DATA = (
    "the loss of the first step is ln(vocab_size) or the source's own loss, and falls",
    "every rank logs the same global_norm",
    "data_time stays well below compute_time (the data pipeline keeps up)",
)
_MODEL = (
    "first-step loss differs from the data-parallel run by less than 0.005 or 0.5 % with the same weights "
    "and data",
    "global_norm differs by less than 10 %; a factor of model_parallel means a missing reduction",
    "step time: communication should be the share the plan states, not more",
)
_PIPELINE = (
    "the last stage's loss equals the stage before within the same bounds (other stages print no valid loss)",
    "`num_layers per stage` in the log is the plan's layers_per_stage",
    "memory of the first and the last stage against the plan; step time against the plan's bubble",
)


def staged(job: Job, target: Strategy) -> list[Stage]:
    """The stages towards `target`, each a strategy that keeps every rule and fits.

    Each stage keeps the cards of `target`. Where the whole model does not fit without model or pipeline
    parallel, the
    stage has fewer layers: it is there to check numbers, not to train.
    """
    n = target.devices
    stages = []
    for name, verify, t, p in (
        ("data parallel", _DATA, 1, 1),
        ("model parallel", _MODEL, target.model_parallel, 1),
        ("pipeline", _PIPELINE, target.model_parallel, target.pipeline_stage),
    ):
        if (name == "model parallel" and t == 1) or (name == "pipeline" and p == 1):
            continue
        if t * p * target.context_parallel == n // target.data_parallel:
            stages.append(Stage(name, job, Estimator(job).estimate(target), verify))
            continue
        stage = _reduced(job, n, t, p, name, verify)
        if stage is not None:
            stages.append(stage)
    if not stages or stages[-1].estimate.strategy != target:
        stages.append(Stage("the plan", job, Estimator(job).estimate(target), _PIPELINE))
    return stages


def _reduced(job: Job, n: int, t: int, p: int, name: str, verify: tuple[str, ...]) -> Stage | None:
    """The best strategy with these degrees, for the whole model or for the deepest half of it that fits."""
    layers = job.model.num_layers
    while layers >= p:
        model = job.model.model_copy(update={"num_layers": layers})
        d = n // (t * p)
        shallow = job_with_batch(Job(**{**vars(job), "model": model}), max(1, job.global_batch // d) * d)
        best = search(shallow, n, top=1, fixed=Fixed(model_parallel=t, pipeline_stage=p)).best
        if best:
            note = ""
            if layers < job.model.num_layers:
                note = f"{layers} of {job.model.num_layers} layers: the whole model does not fit yet"
            if shallow.global_batch != job.global_batch:
                note += f"{'; ' if note else ''}global batch {shallow.global_batch}"
            return Stage(name, shallow, best[0], verify, note)
        layers //= 2
    return None


def micro_batch_advice(pipeline_stage: int) -> tuple[int, int]:
    """micro_batch_num worth starting with: two to four times the stages; (1, 1) without a pipeline."""
    return (2 * pipeline_stage, 4 * pipeline_stage) if pipeline_stage > 1 else (1, 1)
