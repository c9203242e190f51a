"""mindferry plan"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.planning.estimate import Estimate
    from mindferry.planning.layout import Violation
    from mindferry.planning.search import Found
    from mindferry.planning.session import Checked, Request, Resolved

EXAMPLE = "Example: mindferry plan --model gpt3-175b --devices 1024 --device ascend-910b-64g --write run.yaml"


@command("plan")
def plan(
    model: str | None = typer.Option(
        None,
        "--model",
        metavar="SRC|PRESET|RUN.YAML",
        help="Model directory, preset (gpt2, gpt3-175b, ...) or YAML.",
    ),
    devices: int | None = typer.Option(None, "--devices", help="Devices of the cluster."),
    device: str = typer.Option(
        "ascend-910b-64g", "--device", help="Kind of device; 'this-machine' once calibrated."
    ),
    hardware: Path | None = typer.Option(
        None, "--hardware", metavar="FILE", help="YAML with a device of your own."
    ),
    hosts: int | None = typer.Option(None, "--hosts", help="Hosts, when not as many as the device's usual."),
    global_batch: int | None = typer.Option(None, "--global-batch", metavar="B", help="Sequences a step."),
    seq_length: int | None = typer.Option(
        None, "--seq-length", metavar="S", min=1, help="Tokens in a sequence."
    ),
    data_parallel: int | None = typer.Option(
        None, "--data-parallel", min=1, help="Decide this degree yourself."
    ),
    model_parallel: int | None = typer.Option(
        None, "--model-parallel", min=1, help="Decide this degree yourself."
    ),
    pipeline_stage: int | None = typer.Option(
        None, "--pipeline-stage", min=1, help="Decide this degree yourself."
    ),
    context_parallel: int | None = typer.Option(
        None, "--context-parallel", min=1, help="Decide this degree yourself."
    ),
    micro_batch_num: int | None = typer.Option(
        None, "--micro-batch-num", min=1, help="Decide this yourself."
    ),
    batch_size: int | None = typer.Option(None, "--batch-size", min=1, help="Sequences a micro-batch."),
    interleave: int | None = typer.Option(None, "--pp-interleave-num", min=1, help="Virtual stages a stage."),
    optimizer_level: int | None = typer.Option(
        None, "--optimizer-level", min=0, max=3, help="Optimizer parallel: 0 (off) to 3."
    ),
    check: Path | None = typer.Option(None, "--check", metavar="RUN.YAML", help="Examine an existing YAML."),
    write: Path | None = typer.Option(None, "--write", metavar="RUN.YAML", help="Write the best strategy."),
    layout: str = typer.Option(
        "1.x", "--layout", help="Layout of --write: 1.x or 2.x (the latter was never run)."
    ),
    staged: bool = typer.Option(
        False, "--staged", help="The way there: data, then model, then pipeline parallel."
    ),
    explain: bool = typer.Option(False, "--explain", help="Print every formula with its numbers."),
    svg: Path | None = typer.Option(None, "--svg", metavar="DIR", help="Write schedule.svg and memory.svg."),
    memory_convention: str = typer.Option("mindspore", "--memory-convention", help="mindspore or paper."),
    compute_dtype: str | None = typer.Option(None, "--compute-dtype", help="bfloat16, float16 or float32."),
    params_dtype: str | None = typer.Option(None, "--params-dtype", help="float32, bfloat16 or float16."),
    flash_attention: bool | None = typer.Option(
        None, "--flash-attention/--no-flash-attention", help="Fused scores."
    ),
    causal_flops: bool = typer.Option(
        False, "--causal-flops", help="Count half the scores, as mindformers' log."
    ),
    top: int = typer.Option(5, "--top", min=1, max=100, help="How many strategies to show."),
    dryrun_log: list[Path] = typer.Option(
        [],
        "--dryrun-log",
        metavar="LOG...",
        help="With --check: DryRun logs, one a stage in order, to calibrate.",
    ),
    measured_step: float | None = typer.Option(
        None, "--measured-step", metavar="SECONDS", help="With --check: a measured step time, to calibrate."
    ),
    calibrate: bool = typer.Option(False, "--calibrate", help="Measure this machine and keep the result."),
    layer_spec: str = typer.Option(
        "portable", "--layer-spec", help="With --calibrate: the layers of the training runs."
    ),
    calibration_file: Path | None = typer.Option(
        None, "--calibration-file", metavar="FILE", help="Where calibrations are kept."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Which parallel strategy, before anyone touches a cluster.

    Without --check it searches; with --check it says what is wrong with a YAML, when mindformers would notice, and
    which working strategy is nearest. Memory and time come from formulas; none was measured on Ascend.
    """
    from mindferry.cli.choices import one_of
    from mindferry.planning.search import Fixed
    from mindferry.planning.session import Request

    one_of("--layout", layout, ("1.x", "2.x"))
    kinds = ("bfloat16", "float16", "float32")
    request = Request(
        model=model, devices=devices, device=device, hardware=hardware, hosts=hosts, global_batch=global_batch,
        seq_length=seq_length, convention=memory_convention,
        compute_dtype=one_of("--compute-dtype", compute_dtype, kinds) if compute_dtype else None,
        params_dtype=one_of("--params-dtype", params_dtype, kinds) if params_dtype else None,
        flash_attention=flash_attention, causal_flops=causal_flops, top=top, calibration=calibration_file,
        fixed=Fixed(
            data_parallel=data_parallel, model_parallel=model_parallel, pipeline_stage=pipeline_stage,
            context_parallel=context_parallel, micro_batch_num=micro_batch_num, batch_size=batch_size,
            pp_interleave_num=interleave, optimizer_shard_level=optimizer_level,
        ),
    )  # fmt: skip
    if calibrate:
        from mindferry.layers import LAYER_SPECS

        return _calibrate(calibration_file, one_of("--layer-spec", layer_spec, LAYER_SPECS))
    if check is not None:
        return _check(request, check, dryrun_log, measured_step, explain, svg)
    if dryrun_log or measured_step is not None:
        from mindferry.errors import UsageError

        raise UsageError("--dryrun-log and --measured-step say nothing without --check RUN.YAML",
                         remedy="name the YAML that was run", id="plan.usage")  # fmt: skip
    return _search(request, write, layout, staged, explain, svg)


def _search(
    request: Request, write: Path | None, layout: str, staged: bool, explain: bool, svg: Path | None
) -> Result:
    from mindferry.planning import report, session

    resolved = session.resolve(request)
    with Progress("planning", total=None, unit="searches") as bar:
        found = session.plan(resolved, request)
        bar.advance()
    findings = [Finding("plan.assumed", "info", note) for note in resolved.notes]
    if not found.best:
        return _nothing_fits(resolved, request, found, findings)
    best, job = found.best[0], resolved.job
    extra, lines = _ranking(resolved, found, request.model or "")
    findings += _warnings(resolved, best)
    if staged:
        extra["stages"], more = _staged(resolved, best, write, layout)
        lines += more
    if write is not None:
        _write(write, resolved, best, layout)
        extra["written"] = str(write)
        lines += ["", f"written: {write}"]
    if svg is not None:
        extra["pictures"] = _pictures(svg, best)
    if explain:
        extra["explanation"] = report.explain(best, job)
        lines += ["", *extra["explanation"]]
    return Result(findings=findings, extra=extra, text="\n".join(lines))


def _ranking(resolved: Resolved, found: Found, name: str) -> tuple[dict[str, Any], list[str]]:
    from mindferry.planning import calibration, report, write
    from mindferry.planning.advice import micro_batch_advice
    from mindferry.planning.search import sensitivity, ties

    job, best = resolved.job, found.best[0]
    entries = [report.as_json(item, job) for item in found.best]
    ranges = sensitivity(job, found.best)
    for entry, cases in zip(entries, ranges, strict=True):
        entry["sensitivity_step_seconds"] = cases
    for entry, item in zip(entries, found.best, strict=True):
        entry["dryrun"] = write.dryrun_commands(item.strategy)
    for number, group in enumerate(ties(found.best)):
        for i in group:
            entries[i]["tie_group"] = number
    low, high = micro_batch_advice(best.strategy.pipeline_stage)
    per_host = job.device.devices_per_host
    extra: dict[str, Any] = {
        "model": job.model.model_dump(), "parameters": job.model.num_parameters(), "devices": resolved.devices,
        "device": job.device.model_dump(), "seq_length": job.seq_length, "global_batch_size": job.global_batch,
        "memory_convention": job.convention.name, "calibration": calibration.summary(job),
        "strategies": entries, "rejected": _rejected(found),
        "searched": {"examined": found.examined, "could_not_win": found.skipped, "fitting": found.fitting},
        "launch": write.launch_commands(best.strategy, per_host),
        "dryrun": write.dryrun_commands(best.strategy),
        "micro_batch_num_suggested": [low, high],
    }  # fmt: skip
    lines = [
        f"{name}, {job.model.num_parameters():,} parameters, on {resolved.devices} x {job.device.name}; "
        f"seq_length {job.seq_length}, global batch {job.global_batch}, memory as {job.convention.name}",
        "",
        report.table(found.best, job),
        "",
        report.stage_table(best),
        "",
        report.breakdown(best),
        *_derivation(resolved, best, (low, high)),
        _stability(ranges),
        f"device figures: {job.device.confidence} confidence; {job.device.source}",
        f"calibration: {extra['calibration']['source']}",
        "",
        "start:  "
        + extra["launch"][0]
        + (f"   (and {len(extra['launch']) - 1} more hosts)" if len(extra["launch"]) > 1 else ""),
        "dryrun: " + extra["dryrun"][best.heaviest_stage],
    ]
    return extra, lines


def _derivation(resolved: Resolved, best: Estimate, micro: tuple[int, int]) -> list[str]:
    """How the degrees follow from each other, in the words of the field."""
    st, layers = best.strategy, resolved.job.model.num_layers
    n, p = resolved.devices, st.pipeline_stage
    lines = [
        f"data_parallel {st.data_parallel} = {n} devices / ({st.model_parallel} model_parallel x {p} pipeline_stage"
        + (f" x {st.context_parallel} context_parallel)" if st.context_parallel > 1 else ")")
    ]
    if p > 1:
        even = f"{layers} layers / {p} stages = {layers / p:g} a stage"
        moved = "" if len(set(st.layers_per_stage)) == 1 else (
            f"; {list(st.layers_per_stage)} here, the head weighs as much as layers do"
        )  # fmt: skip
        lines.append(even + moved)
        lines.append(
            f"micro_batch_num {st.micro_batch_num}; {micro[0]} to {micro[1]} (2 to 4 x the stages) is enough to start "
            "with, more makes the bubble smaller"
        )
    if st.vocab_size and st.vocab_size != resolved.job.model.vocab_size:
        rows = st.vocab_size - resolved.job.model.vocab_size
        lines.append(
            f"vocab_size {st.vocab_size}: {rows} unused rows ({rows * resolved.job.model.hidden_size:,} parameters) so "
            f"that model_parallel {st.model_parallel} divides it"
        )
    return lines


def _stability(ranges: list[dict[str, float]]) -> str:
    """Whether the first place survives the uncertainty of the device's figures."""
    lost = [name for name in ranges[0] if min(range(len(ranges)), key=lambda i: ranges[i][name]) != 0]
    spread = f"{min(ranges[0].values()):.3g} to {max(ranges[0].values()):.3g} s"
    first = f"step of the first: {spread} for efficiency ±10 % and bandwidth ±30 %"
    return first + (
        f"; another one leads at {', '.join(lost)}" if lost else "; it stays first in all of them"
    )


def _rejected(found: Found) -> list[dict[str, Any]]:
    """What was turned away: a rule, how often, one example, and the shown strategy nearest to it."""
    from mindferry.planning.search import distance

    out = []
    for rule, count in found.reasons.most_common():
        strategy, reason = found.examples[rule]
        near = min(found.best, key=lambda item: distance(item.strategy, strategy), default=None)
        out.append({"strategy": strategy.label(), "rule": rule, "reason": reason, "count": count,
                    "nearest": near.strategy.label() if near else None})  # fmt: skip
    return out


def _warnings(resolved: Resolved, best: Estimate) -> list[Finding]:
    from mindferry.planning.constraints import check
    from mindferry.planning.layout import layout_of

    return [
        Finding(
            f"plan.{item.rule}", "warning", item.message, f"shows {item.when} ({item.where})", item.remedy
        )
        for item in check(layout_of(best.strategy, resolved.job))
        if item.severity == "warning"
    ]


def _nothing_fits(resolved: Resolved, request: Request, found: Found, findings: list[Finding]) -> Result:
    from mindferry.planning import session

    if any(value is not None for value in vars(request.fixed).values()):
        layout = session.stated_layout(resolved, request.fixed)
        checked = session.check_layout(resolved, layout, [])
        if checked.violations:
            return _verdict(resolved, checked, findings, explain=False, svg=None)
    reason, more = session.closing_the_gap(resolved, found)
    way = (
        f"{more} devices of this kind would hold it"
        if more
        else "a device with more memory, or a smaller model"
    )
    findings.append(Finding("plan.nothing-fits", "problem", f"no strategy fits on {resolved.devices} devices; {reason}",
                            "every cut, optimizer level and recompute setting was tried", way))  # fmt: skip
    return Result(
        "problem", findings, {"strategies": [], "rejected": _rejected(found), "devices_that_fit": more}
    )


def _check(
    request: Request, path: Path, logs: list[Path], step: float | None, explain: bool, svg: Path | None
) -> Result:
    from mindferry.planning import session

    resolved = session.resolve(request, path)
    assert resolved.run is not None
    findings = [Finding("plan.assumed", "info", note) for note in resolved.notes]
    layout = resolved.run.layout
    if request.global_batch is not None:
        layout.global_batch = request.global_batch
    checked = session.check_layout(resolved, layout, resolved.run.unread)
    if layout.num_experts > 1:
        findings.append(Finding("plan.experts", "info", "a mixture of experts: rules are checked, memory and time are "
                                "not estimated", "the formulas are for dense models"))  # fmt: skip
    if (logs or step is not None) and checked.estimate is not None:
        findings += _learn(resolved, request, checked, logs, step, path)
        resolved = session.resolve(request, path)
        assert resolved.run is not None
        checked = session.check_layout(resolved, resolved.run.layout, resolved.run.unread)
    return _verdict(resolved, checked, findings, explain, svg)


def _verdict(
    resolved: Resolved, checked: Checked, findings: list[Finding], explain: bool, svg: Path | None
) -> Result:
    from mindferry.planning import report

    job = resolved.job
    findings = findings + [_finding(item) for item in checked.violations]
    near = report.as_json(checked.nearest, job) if checked.nearest else None
    asked = f"DP{checked.layout.data_parallel} MP{checked.layout.model_parallel} PP{checked.layout.pipeline_stage}"
    extra: dict[str, Any] = {
        "strategies": [report.as_json(checked.estimate, job)] if checked.estimate and checked.good else [],
        "rejected": [
            {"strategy": asked, "rule": item.rule, "reason": item.message, "when": item.when, "where": item.where,
             "remedy": item.remedy, "nearest": near["label"] if near else None}
            for item in checked.violations if item.severity == "problem"
        ],
        "nearest": near,
    }  # fmt: skip
    outcome = (
        ("keeps every rule and fits" if checked.estimate else "keeps every rule")
        if checked.good
        else "does not work"
    )
    lines = [f"{asked} on {resolved.devices} x {job.device.name}: {outcome}"]
    shown = checked.estimate or checked.nearest
    if checked.nearest is not None:
        lines.append(f"nearest that works: {checked.nearest.strategy.label()}")
    if checked.estimate is not None:
        lines += ["", report.table([checked.estimate], job), "", report.stage_table(checked.estimate)]
    if shown is not None and svg is not None:
        extra["pictures"] = _pictures(svg, shown)
    if explain and shown is not None:
        extra["explanation"] = report.explain(shown, job)
        lines += ["", *extra["explanation"]]
    return Result("good" if checked.good else "problem", findings, extra, "\n".join(lines))


def _finding(item: Violation) -> Finding:
    cause = f"shows {item.when} ({item.where})"
    return Finding(f"plan.{item.rule}", item.severity, item.message, cause, item.remedy)


def _learn(
    resolved: Resolved, request: Request, checked: Checked, logs: list[Path], step: float | None, path: Path
) -> list[Finding]:
    """Put measured memory and time into the calibration file."""
    from mindferry.errors import UsageError
    from mindferry.planning import calibration

    assert checked.estimate is not None
    st, job = checked.estimate.strategy, resolved.job
    if len(logs) > st.pipeline_stage:
        raise UsageError(f"{len(logs)} DryRun logs for {st.pipeline_stage} stages", remedy="one log a stage, in order",
                         id="plan.dryrun-log")  # fmt: skip
    points: list[Any] = [
        calibration.memory_point(job, st, stage, calibration.dryrun_peak(log), f"{path.name} stage {stage}")
        for stage, log in enumerate(logs)
    ]
    if step is not None:
        if not 0 < step < 1e7:
            raise UsageError(f"--measured-step {step}: expected seconds above 0", remedy="", id="plan.usage")
        points.append(calibration.time_point(job, st, step, f"{path.name} step"))
    target = request.calibration or calibration.default_path()
    content = calibration.added(calibration.load(target), job, points)
    calibration.save(target, content)
    fit = calibration.fitted(content.entries[calibration.key(job)])
    return [
        Finding(
            "plan.calibrated", "info",
            f"{target}: {len(points)} points added for {calibration.key(job)}; activations x {fit.activations:.3f}, "
            f"+ {fit.constant_bytes / 2**30:.2f} GiB, computing time x {fit.time:.3f}",
        )
    ]  # fmt: skip


def _staged(
    resolved: Resolved, best: Estimate, write: Path | None, layout: str
) -> tuple[list[dict[str, Any]], list[str]]:
    from mindferry.planning import report
    from mindferry.planning.advice import staged

    out, lines = [], ["", "the way there, one kind of parallelism at a time:"]
    for number, stage in enumerate(staged(resolved.job, best.strategy), 1):
        entry: dict[str, Any] = {"name": stage.name, "note": stage.note, "verify": list(stage.verify),
                                 "strategy": report.as_json(stage.estimate, stage.job)}  # fmt: skip
        note = f" ({stage.note})" if stage.note else ""
        lines.append(f"{number}. {stage.name}: {stage.estimate.strategy.label()}{note}")
        lines += [f"   see: {text}" for text in stage.verify]
        if write is not None:
            target = write.with_name(f"{write.stem}.stage{number}{write.suffix or '.yaml'}")
            _write(target, resolved, stage.estimate, layout, stage.job)
            entry["written"] = str(target)
            lines.append(f"   written: {target}")
        out.append(entry)
    return out, lines


def _write(target: Path, resolved: Resolved, estimate: Estimate, layout: str, job: Any = None) -> None:
    from mindferry.planning.write import write_yaml

    write_yaml(
        target, estimate.strategy, job or resolved.job, seconds=estimate.step_seconds,
        base=None if layout == "2.x" else resolved.base, layout=layout, params_dtype=resolved.params_dtype,
    )  # fmt: skip


def _pictures(folder: Path, estimate: Estimate) -> list[str]:
    from mindferry.errors import UsageError
    from mindferry.planning import draw
    from mindferry.planning.write import write_text

    if not folder.is_dir():
        raise UsageError(f"--svg {folder}: no such directory", remedy="create it", id="plan.svg")
    written = []
    for name, text in draw.pictures(estimate).items():
        written.append(folder / f"{name}.svg")
        write_text(written[-1], text)
    return [str(path) for path in written]


def _calibrate(target: Path | None, layer_spec: str) -> Result:
    from mindferry.planning import calibration, measure

    path = target or calibration.default_path()
    busy = measure.others_load()
    findings = []
    if busy > 0.2:
        findings.append(Finding("plan.busy", "warning", f"other programs use {100 * busy:.0f} % of this machine",
                                "step times come out too long", "measure again when it is quiet"))  # fmt: skip
    with Progress("measuring this machine", total=measure.STEPS, unit="measurements") as bar:
        device = measure.this_machine(lambda note: bar.advance(note=note), layer_spec)
    calibration.save(path, calibration.load(path).model_copy(update={"device": device}))
    rates = ", ".join(f"{kind} {rate / 1e9:.0f} GFLOP/s" for kind, rate in device.flops.items())
    links = device.intra_host_bandwidth
    text = (
        f"{path}: this-machine\n  matrix products  {rates}\n  memory           {device.memory_bandwidth / 1e9:.1f} "
        f"GB/s, {device.memory_bytes / 2**30:.1f} GiB\n  collectives      "
        + (f"{links / 1e9:.2f} GB/s, {device.intra_host_latency * 1e6:.0f} us" if links else "not measured")
    )
    return Result(
        findings=findings, extra={"device": device.model_dump(), "calibration_file": str(path)}, text=text
    )


def register(app: typer.Typer) -> None:
    app.command("plan", epilog=EXAMPLE)(plan)
