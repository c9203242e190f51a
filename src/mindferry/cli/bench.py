"""mindferry bench"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry bench run/ --against gpt2/"


@command("bench")
def bench(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate."),
    against: Path = typer.Option(None, "--against", metavar="SRC", help="Also the source, in PyTorch."),
    baseline: list[Path] = typer.Option(
        [], "--baseline", metavar="RUN", help="Also this other run; repeatable."
    ),
    stock: bool = typer.Option(True, "--stock/--no-stock", help="Also portable layers, run eagerly."),
    rounds: int = typer.Option(12, "--rounds", min=6, help="Steps to measure on each side."),
    mfu: bool = typer.Option(
        True,
        "--mfu/--no-mfu",
        help="Measure the machine's matrix products and memory, for MFU and the roofline.",
    ),
    layers: bool = typer.Option(True, "--layers/--no-layers", help="Also every layer of the run on its own."),
    operators: bool = typer.Option(
        True, "--operators/--no-operators", help="Also the run's operators, by MindSpore's profiler."
    ),
    force: bool = typer.Option(False, "--force", help="Compare runs of different models or data."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Where the time and the memory of a step go, against stock, the source and earlier runs.

    Every side is a process; they take turns, so that what disturbs the machine disturbs all of them. Writes
    RUN/bench.json.
    """
    from mindferry.checking import bench as work
    from mindferry.report import collect
    from mindferry.targets.run_directory import RunDirectory, write_json

    directory = RunDirectory.open(run)
    others = [RunDirectory.open(path) for path in baseline]
    collect.check_comparable(
        collect.gather(directory.root), [collect.gather(other.root) for other in others], force
    )
    log = directory.logs / "bench.log"
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mindferry-bench-") as name:
        folder = Path(name)
        tasks = {"run": work.run_task(directory, rounds, log, None, layers, operators)}
        if stock:
            tasks["stock"] = work.run_task(directory, rounds, log, dict(work.STOCK))
        for number, other in enumerate(others):
            label = other.root.name if other.root.name not in tasks else f"{other.root.name}-{number + 1}"
            tasks[label] = work.run_task(other, rounds, log)
        if against is not None:
            tasks["torch"] = work.torch_task(directory, against, folder, log)
        total = 2 * len(tasks) + rounds + mfu + layers + operators
        with Progress("measuring", total=total, unit="parts") as bar:
            sides = work.measure(tasks, rounds, folder, lambda note: bar.advance(note=note))
            work.check(sides, "run")
            rates = work.machine_rates() if mfu else None
    extra, findings = _assemble(directory, sides, rates)
    write_json(directory.root / "bench.json", extra)
    slower = [row for row in extra["ratios"] if row["verdict"] == "slower"]
    return Result("problem" if slower else "good", findings, extra, _text(extra))


def _assemble(
    directory: Any, sides: Any, rates: tuple[float, float] | None
) -> tuple[dict[str, Any], list[Finding]]:
    from mindferry.checking import bench as work
    from mindferry.checking import speed
    from mindferry.targets import run_yaml

    content = run_yaml.read(directory.yaml)
    count = content["runner_config"]["gradient_accumulation_steps"]
    findings = [
        Finding(
            "bench.side",
            "warning",
            f"{name} gave nothing: {side.failure}",
            remedy=f"see {directory.logs}/bench.log",
        )
        for name, side in sides.items()
        if side.failure
    ]
    rows = []
    for name, side in sides.items():
        parts = work.decompose(side, count)
        rows += [
            {
                "name": part,
                "side": name,
                "seconds_median": median,
                "seconds_spread": spread,
                "count": len(side.times("step")),
            }
            for part, (median, spread) in sorted(parts.items(), key=lambda item: _order(item[0]))
        ]
        for text in work.does_not_add_up(parts):
            findings.append(
                Finding("bench.sum", "warning", f"{name}: parts and whole do not add up: {text}",
                        "alone, the parts took longer than inside the step: the machine was disturbed",
                        "measure again with more --rounds")
            )  # fmt: skip
    per_layer = _layers(directory, sides["run"], rates)
    findings += _doubts(sides["run"], per_layer)
    found = work.ratios(sides, "run")
    for row in found:
        if row["verdict"] == "slower":
            findings.append(
                Finding("bench.slower", "problem", f"{row['name']}: {1 / row['ratio']:.2f} times as slow")
            )
    tokens = content["runner_config"]["batch_size"] * count * content["model"]["model_config"]["seq_length"]
    seconds = next(r["seconds_median"] for r in rows if (r["side"], r["name"]) == ("run", "step"))
    per_token, rate = work.flops_per_token(directory), rates[0] if rates else None
    mfu = tokens / seconds * per_token / rate if rate and per_token else None
    extra = {
        "run": str(directory.root),
        "rows": rows,
        "ratios": found,
        "rule": speed.RULE,
        "start_seconds": {name: side.start_seconds for name, side in sides.items() if not side.failure},
        "peak_memory_bytes": sides["run"].peak_memory_bytes,
        "peak_memory_bytes_by_side": {n: s.peak_memory_bytes for n, s in sides.items() if not s.failure},
        "memory_parts": work.memory_parts(sides["run"]),
        "tokens_per_second": tokens / seconds,
        "flops_per_token": per_token,
        "gemm_flops_per_second": rate,
        "memory_bytes_per_second": rates[1] if rates else None,
        "mfu": mfu,
        **per_layer,
        "operators": sides["run"].operators,
    }
    return extra, findings


def _layers(directory: Any, side: Any, rates: tuple[float, float] | None) -> dict[str, Any]:
    """The table of layers with its sums and the source of its formulas."""
    from mindferry.checking import bench as work
    from mindferry.checking import roofline
    from mindferry.training import engine

    content = engine.prepare(directory, engine.Options())
    engine.precision_notes(content)
    model = work.model_of(directory)
    rows = roofline.layer_rows(side, model[0] if model else None, content, rates)
    count = content["model"]["model_config"]["num_layers"] if rows else 0
    return {
        "layers": rows,
        "layers_sum": roofline.check_sum(side, rows, count) if rows else None,
        "roofline_source": roofline.SOURCE,
    }


def _doubts(side: Any, per_layer: dict[str, Any]) -> list[Finding]:
    """Where the layers do not add up to the whole, or the profiler gave nothing."""
    findings, sums = [], per_layer["layers_sum"]
    for key in ("forward", "both") if sums else ():
        if not 1 / SUM_WITHIN <= sums[key] <= SUM_WITHIN:
            passes = {"both": "forward and backward"}.get(key, key)
            findings.append(
                Finding("bench.layers", "warning", f"the parts' {passes} are {sums[key]:.2f} times the whole pass",
                        "small pieces pay for being started, or the machine was disturbed",
                        "measure again with more --rounds")
            )  # fmt: skip
    if side.operators.get("failed"):
        findings.append(Finding("bench.operators", "info", f"no operators: {side.operators['failed']}"))
    return findings


# The sum of parts that were measured apart may be this many times the whole, or its inverse.
SUM_WITHIN = 1.5
_ORDER = ("step", "data", "compute", "forward", "backward", "optimizer", "rest")


def _order(part: str) -> int:
    return _ORDER.index(part) if part in _ORDER else len(_ORDER)


def _text(extra: dict[str, Any]) -> str:
    lines = [f"{'side':16} {'part':10} {'median':>11} {'spread':>11}"]
    lines += [
        f"{row['side'][:16]:16} {row['name']:10} {row['seconds_median'] * 1e3:8.2f} ms "
        f"{row['seconds_spread'] * 1e3:8.2f} ms"
        for row in extra["rows"]
    ]
    lines += [f"{row['name']:27} ratio {row['ratio']:.2f}  {row['verdict']} (noise ±{row['noise']:.0%}), "
              f"memory: {row['memory_verdict']}" for row in extra["ratios"]]  # fmt: skip
    lines += [
        f"{f'{name}: building, compiling':27} {seconds:9.1f} s"
        for name, seconds in extra["start_seconds"].items()
    ]
    lines += [f"{name:27} {size / 2**20:9.1f} MiB" for name, size in extra["memory_parts"].items()]
    lines.append(f"{'peak memory':27} {extra['peak_memory_bytes'] / 2**20:9.1f} MiB")
    mfu = (
        f", MFU {extra['mfu']:.1%} of {extra['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s"
        if extra["mfu"]
        else ""
    )
    lines.append(f"{extra['tokens_per_second']:,.0f} tokens/s{mfu}")
    return "\n".join([*lines, *_layer_text(extra), *_operator_text(extra["operators"])])


def _layer_text(extra: dict[str, Any]) -> list[str]:
    if not extra["layers"]:
        return []
    lines = ["", f"{'part of the model':27} {'forward':>11} {'backward':>11}  of the roofline"]
    for row in extra["layers"]:
        roof = row.get("roofline")
        shown = f"{roof['share_of_roof']:6.0%}, {roof['bound']}-bound" if roof else ""
        times = "".join(f" {row[f'{key}_seconds'] * 1e3:8.2f} ms" for key in ("forward", "backward"))
        lines.append(f"{row['name'][:27]:27}{times}  {shown}")
    sums = extra["layers_sum"]
    lines.append(
        f"{'sum / the whole pass':27} {sums['forward']:11.2f} {sums['both']:11.2f}  (second: forward and backward)"
    )
    return lines


def _operator_text(found: dict[str, Any]) -> list[str]:
    if not found.get("by_type"):
        return []
    lines = ["", f"{'operator':36} {'a step':>8} {'time':>11} {'share':>6}"]
    for row in [*found["by_type"][:12], *found["by_place"]]:
        lines.append(
            f"{row['name'][:36]:36} {row['count']:8.0f} {row['seconds'] * 1e3:8.2f} ms {row['share']:6.1%}"
        )
    lines.append(f"{'between operators':45} {found['between_seconds'] * 1e3:8.2f} ms")
    return lines


def register(app: typer.Typer) -> None:
    app.command("bench", epilog=EXAMPLE)(bench)
