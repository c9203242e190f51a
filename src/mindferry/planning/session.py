"""What `mindferry plan` does, without the command line: resolve, search or check, and say why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError
from mindferry.planning import calibration, runfile, settings
from mindferry.planning.constraints import check
from mindferry.planning.estimate import Estimate, Estimator, Job
from mindferry.planning.fromlayout import strategy_of
from mindferry.planning.layout import BUILD, Layout, Violation, layout_of
from mindferry.planning.search import (
    MAX_DEVICES,
    Fixed,
    Found,
    default_global_batch,
    devices_that_fit,
    nearest,
    search,
)
from mindferry.planning.strategy import Strategy
from mindferry.spec import ModelSpec


@dataclass(frozen=True)
class Request:
    """What the person asked for; None where the default is to be used."""

    model: str | None = None
    devices: int | None = None
    device: str = "ascend-910b-64g"
    hardware: Path | None = None
    hosts: int | None = None
    global_batch: int | None = None
    seq_length: int | None = None
    convention: str = "mindspore"
    compute_dtype: str | None = None
    params_dtype: str | None = None
    flash_attention: bool | None = None
    causal_flops: bool = False
    fixed: Fixed = field(default_factory=Fixed)
    top: int = 5
    calibration: Path | None = None


@dataclass
class Resolved:
    """The job, and what was decided on the way."""

    job: Job
    devices: int
    base: Path | None
    params_dtype: str
    notes: list[str] = field(default_factory=list)
    run: runfile.RunFile | None = None


@dataclass
class Checked:
    """The verdict on a stated strategy.

    Attributes:
        violations: rules broken, and memory.
        estimate: what the strategy costs, when it can be worked out.
        nearest: the closest strategy that keeps every rule and fits.
    """

    layout: Layout
    violations: list[Violation]
    estimate: Estimate | None = None
    nearest: Estimate | None = None

    @property
    def good(self) -> bool:
        return all(item.severity != "problem" for item in self.violations)


def model_of(name: str) -> tuple[ModelSpec, Path | None]:
    """The model named on the command line: a preset, a training YAML, or anything sources can open.

    Raises:
        UsageError: nothing of that name.
        MindferryError: a damaged model.
    """
    path = Path(name)
    if runfile.is_training_yaml(path):
        found = runfile.read(path)
        if found.model is None:
            raise MindferryError(
                f"{path}: model_config lacks {', '.join(found.missing)}",
                remedy="add them, or give --model the model directory and --check this file",
                id="plan.model-sizes",
            )
        return found.model, path
    if path.suffix.lower() in (".yaml", ".yml"):
        raise UsageError(f"--model {name}: no such file", remedy="check the path", id="plan.no-file")
    if path.is_dir() and (path / "run.yaml").is_file():
        return model_of(str(path / "run.yaml"))
    if path.exists():
        from mindferry.sources import open_source

        return open_source(path).spec, None
    return settings.preset(name), None


def resolve(request: Request, check_file: Path | None = None) -> Resolved:
    """The job that `request` describes.

    Raises:
        UsageError: something named does not exist or is out of range.
    """
    device = _device(request)
    notes: list[str] = []
    run: runfile.RunFile | None = None
    base: Path | None = None
    model: ModelSpec | None = None
    if request.model is not None:
        model, base = model_of(request.model)
    if check_file is not None:
        run, base = runfile.read(check_file, request.devices, model), check_file
        model = run.model
        if model is None:
            raise MindferryError(
                f"{check_file}: model_config lacks {', '.join(run.missing)}",
                cause="they come from pretrained_model_dir or from class defaults",
                remedy="give --model the model directory or a preset beside --check",
                id="plan.model-sizes",
            )
    elif base is not None:
        run = runfile.read(base, request.devices)
    if model is None:
        raise UsageError(
            "--model is missing", remedy="name a preset, a model directory or a run.yaml", id="plan.model"
        )
    devices = _devices(request, run, notes)
    compute = request.compute_dtype or (run.compute_dtype if run else "bfloat16")
    params = request.params_dtype or (run.params_dtype if run else "float32")
    if compute != "float32" and not {compute, "bfloat16", "float16"} & set(device.flops):
        notes.append(f"{device.name} has no rate for {compute}: float32 used")
        compute = "float32"
    seq = request.seq_length or (run.seq_length if run else model.max_position_embeddings)
    if seq > model.max_position_embeddings and model.position_embedding == "learned_absolute":
        raise UsageError(
            f"--seq-length {seq}: the model has {model.max_position_embeddings} learned positions",
            remedy=f"--seq-length at most {model.max_position_embeddings}",
            id="plan.seq-length",
        )
    convention = settings.convention(request.convention, params, compute)  # type: ignore[arg-type]
    flash = request.flash_attention
    if flash is None:
        flash = run.layout.use_flash_attention if run and convention.accumulates else convention.accumulates
        flash = flash and device.fused_attention
    batch = _global_batch(request, run, check_file, model, seq, devices, notes)
    job = Job(
        model=model,
        seq_length=seq,
        global_batch=batch,
        device=device,
        convention=convention,
        compute_dtype=compute,  # type: ignore[arg-type]
        flash_attention=flash,
        causal_flops=request.causal_flops,
    )
    measured = calibration.load(request.calibration or calibration.default_path())
    return Resolved(calibration.apply(job, measured), devices, base, params, notes, run)


def _device(request: Request) -> settings.Device:
    if request.hardware is not None:
        device = settings.device_from_file(request.hardware)
    elif request.device == calibration.THIS_MACHINE:
        measured = calibration.load(request.calibration or calibration.default_path()).device
        if measured is None:
            raise UsageError(
                "--device this-machine: not measured yet",
                remedy="run: mindferry plan --calibrate",
                id="plan.device",
            )
        device = measured
    else:
        device = settings.device(request.device)
    if request.hosts is not None:
        if request.hosts < 1 or (request.devices or 0) % request.hosts:
            raise UsageError(
                f"--hosts {request.hosts} does not divide --devices {request.devices}",
                remedy="give hosts with equally many devices",
                id="plan.hosts",
            )
        device = device.model_copy(update={"devices_per_host": (request.devices or 1) // request.hosts})
    return device


def _devices(request: Request, run: runfile.RunFile | None, notes: list[str]) -> int:
    if request.devices is None:
        if run is None:
            raise UsageError("--devices is missing", remedy="give the number of devices", id="plan.devices")
        notes.append(f"--devices not given: taken as the product of the degrees, {run.layout.devices}")
        return run.layout.devices
    if not 1 <= request.devices <= MAX_DEVICES:
        raise UsageError(
            f"--devices {request.devices}: expected 1 to {MAX_DEVICES}",
            remedy="give the number of devices of the cluster",
            id="plan.devices",
        )
    return request.devices


def _global_batch(
    request: Request,
    run: runfile.RunFile | None,
    check_file: Path | None,
    model: ModelSpec,
    seq: int,
    devices: int,
    notes: list[str],
) -> int:
    if request.global_batch is not None:
        if request.global_batch < 1:
            raise UsageError(
                f"--global-batch {request.global_batch}: expected at least 1",
                remedy="",
                id="plan.global-batch",
            )
        return request.global_batch
    if check_file is not None and run is not None and isinstance(run.layout.batch_size, int):
        stated = run.layout.effective_batch if not check(run.layout) or _countable(run.layout) else 0
        if stated >= 1:
            return stated
    batch = default_global_batch(model.num_parameters(), seq, devices)
    notes.append(
        f"--global-batch not given: {batch} sequences ({batch * seq:,} tokens), as GPT-3 of this size"
    )
    return batch


def _countable(layout: Layout) -> bool:
    return not any(item.rule == "degrees.positive" for item in check(layout))


# ---- the two questions -----------------------------------------------------------------------------------------


def plan(resolved: Resolved, request: Request) -> Found:
    """The best strategies."""
    return search(resolved.job, resolved.devices, request.top, request.fixed)


def check_layout(resolved: Resolved, layout: Layout, unread: list[Violation]) -> Checked:
    """The verdict on `layout` for the job: rules first, then memory; with the nearest strategy that works."""
    job = resolved.job
    layout.devices_per_host = job.device.devices_per_host
    violations = [*unread, *check(layout)]
    checked = Checked(layout, violations)
    if any(item.rule == "degrees.positive" for item in violations) or layout.num_experts > 1:
        return checked
    wanted = _as_wanted(layout)
    est = Estimator(job)
    if checked.good:
        checked.estimate = est.estimate(strategy_of(layout))
        violations.extend(memory_violations(checked.estimate))
    if not checked.good:
        checked.nearest = nearest(job, resolved.devices, wanted, est)
    return checked


def memory_violations(estimate: Estimate) -> list[Violation]:
    """The violation that running out of memory is, with the numbers; empty when it fits."""
    if estimate.fits:
        return []
    i = estimate.heaviest_stage
    total, usable = float(estimate.total_bytes[i]), estimate.usable_bytes
    parts = sorted(((float(_at(v, i)), k) for k, v in estimate.memory.items()), reverse=True)[:3]
    made_of = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:.1f}" for size, name in parts)
    return [
        Violation(
            "memory",
            f"stage {i} needs {total / 2**30:.1f} GiB of {usable / 2**30:.1f} usable GiB ({made_of}): Out of Memory!!!",
            BUILD,
            "MindSpore's allocator, in the first step",
            f"{(total - usable) / 2**30:.1f} GiB less a rank: more recompute, a higher optimizer level, a smaller "
            "batch_size, or more model or pipeline parallel",
        )
    ]


def _at(value: Any, stage: int) -> float:
    import numpy as np

    array = np.asarray(value, float).reshape(-1)
    return float(array[min(stage, len(array) - 1)])


def _as_wanted(layout: Layout) -> Strategy:
    """The degrees a layout asks for, whether they work or not, for measuring distance."""
    level = layout.optimizer_shard_level
    return Strategy(
        data_parallel=layout.data_parallel,
        model_parallel=layout.model_parallel,
        context_parallel=layout.context_parallel,
        pipeline_stage=layout.pipeline_stage,
        pp_interleave_num=layout.virtual,
        micro_batch_num=max(1, layout.micro_batches),
        batch_size=layout.batch_size,
        optimizer_shard_level=level,
    )


def stated_layout(resolved: Resolved, fixed: Fixed) -> Layout:
    """The layout of degrees given on the command line; what was left open follows from the rest."""
    job, n = resolved.job, resolved.devices
    t, p, c = fixed.model_parallel or 1, fixed.pipeline_stage or 1, fixed.context_parallel or 1
    d = fixed.data_parallel or max(1, n // max(1, t * p * c))
    b = fixed.batch_size or 1
    m = fixed.micro_batch_num or max(1, job.global_batch // max(1, d * b))
    base = layout_of(
        Strategy(data_parallel=d, model_parallel=t, context_parallel=c, pipeline_stage=p, batch_size=b,
                 pp_interleave_num=fixed.pp_interleave_num or 1, micro_batch_num=m, use_seq_parallel=t > 1,
                 optimizer_shard_level=fixed.optimizer_shard_level or 0),
        job,
    )  # fmt: skip
    rest = job.model.num_layers % (p * (fixed.pp_interleave_num or 1))
    # even layers are what a person means who says nothing about offset
    v = fixed.pp_interleave_num or 1
    rows = [[int(row * p + i < rest) for i in range(p)] for row in range(v)]
    base.offset = 0 if not rest else (rows if v > 1 else rows[0])
    base.devices = n
    return base


def closing_the_gap(resolved: Resolved, found: Found) -> tuple[str, int | None]:
    """When nothing fits: the closest miss in words, and the device count at which something would fit."""
    closest = found.closest
    if closest is None:
        return "no cut of these devices keeps the rules", None
    more = devices_that_fit(resolved.job, resolved.devices)
    need = float(closest.total_bytes.max())
    text = (
        f"closest: {closest.strategy.label()} needs {need / 2**30:.1f} GiB on stage {closest.heaviest_stage}, "
        f"{closest.overflow_bytes / 2**30:.1f} GiB more than the usable {closest.usable_bytes / 2**30:.1f}"
    )
    return text, more


def with_batch(resolved: Resolved, batch: int) -> Resolved:
    return replace(resolved, job=replace(resolved.job, global_batch=batch))
