"""Less communication in data parallelism: `python -m benchmarks.communication [--run RUN] [--workers N] [--json FILE]`.

Each way of sending less is one change of run.yaml against the same run (the demo's unless --run names one):

- twice and four times the micro-batches a step: as many reductions for two and four times the tokens
- averaging after every micro-batch: what the above saves, seen from the other side
- gradients in small buckets, and half precision on the wire (summed in float32)
- the optimizer's moments shared out

Columns: milliseconds for the tokens of the base's step, with the ratio to the base (above 1: faster), the collective's
share of a step, bytes of gradients that one process hands over for the base's tokens, the largest relative difference
of a step's loss from the base's (only where the batches are the same), bytes of moments in one process. All take turns
in every round; medians. --steps counts three steps of warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import demo

ACCUMULATION = "runner_config.gradient_accumulation_steps"
EACH = "runner_wrapper.reduce_every_micro_batch"
BUCKETS = "parallel.comm_fusion"
WIRE = "runner_wrapper.gradient_wire_dtype"
SHARDED = "parallel.enable_parallel_optimizer"


@dataclass(frozen=True)
class Way:
    """`overrides` of run.yaml; a step then does `batches` of the base's batch."""

    name: str
    overrides: dict[str, Any]
    batches: int = 1
    same_batches: bool = True


def ways(accumulation: int) -> list[Way]:
    def fused(mib: float) -> dict[str, Any]:
        return {BUCKETS: {"allreduce": {"mode": "size", "config": mib}}}

    found = [Way("base", {})]
    for factor in (2, 4):
        more = {ACCUMULATION: factor * accumulation}
        found.append(Way(f"{factor} x micro-batches", more, factor, same_batches=False))
    found.append(
        Way(
            "4 x micro-batches, averaged after each",
            {ACCUMULATION: 4 * accumulation, EACH: True},
            4,
            same_batches=False,
        )
    )
    found += [Way("buckets of 1 MiB", fused(1)), Way("buckets of 1/16 MiB", fused(0.0625))]
    found += [Way("float16 on the wire", {WIRE: "float16"}), Way("moments shared out", {SHARDED: True})]
    return found


@dataclass
class Row:
    way: Way
    seconds: list[float] = field(default_factory=list)
    collective: list[float] = field(default_factory=list)
    bytes: float = 0.0
    moments: int = 0
    losses: list[float] = field(default_factory=list)


def measure(run: Path, workers: int, steps: int, rounds: int) -> list[Row]:
    from mindferry.diagnosis.communication.examine import exchange_of
    from mindferry.diagnosis.communication.measure import Trials, rank_file, scaling
    from mindferry.diagnosis.loss.rerun import scratch_of
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import workers as parent

    directory = RunDirectory.open(run)
    gradient_bytes = exchange_of(directory, workers).gradient_bytes
    rows = [
        Row(way)
        for way in ways(run_yaml.read(directory.yaml)["runner_config"]["gradient_accumulation_steps"])
    ]
    with scratch_of(directory) as scratch:
        trials = Trials(scratch.run, steps)
        for number in range(rounds):
            for row in rows:
                print(f"round {number + 1}: {row.way.name}", file=sys.stderr, flush=True)
                outcome = parent.train(scratch.run, trials.options(row.way.overrides, workers))
                found = scaling(scratch.run.root, workers)
                row.seconds.append(found.step / row.way.batches)
                row.collective.append(found.mean("collective") / found.step)
                halves = row.way.overrides.get(WIRE) == "float16"
                row.bytes = (
                    gradient_bytes * (0.5 if halves else 1) * found.ranks[0].reductions / row.way.batches
                )
                row.moments = outcome.optimizer_bytes
                lines = rank_file(scratch.run.root, 0).read_text(encoding="utf-8").splitlines()
                row.losses = [json.loads(line)["loss"] for line in lines]
    return rows


def table(rows: list[Row]) -> list[dict[str, Any]]:
    base = rows[0]
    found = []
    for row in rows:
        pairs = zip(row.losses, base.losses, strict=True)
        error = (
            max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs) if row.way.same_batches else None
        )
        # A round's ratio is of two neighbours in time, so that a slow minute counts for both.
        ratios = [theirs / mine for mine, theirs in zip(row.seconds, base.seconds, strict=True)]
        found.append(
            {
                "name": row.way.name,
                "milliseconds": 1e3 * statistics.median(row.seconds),
                "ratio": statistics.median(ratios),
                "collective_share": statistics.median(row.collective),
                "gradient_bytes": row.bytes,
                "loss_error": error,
                "optimizer_bytes": row.moments,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, help="a run directory (the demo's)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the table there, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or demo.migrated(Path(folder), steps=200)
        rows = table(measure(run, args.workers, args.steps, args.rounds))
    print(f"{args.workers} processes on {len(os.sched_getaffinity(0))} cores, {args.rounds} rounds")
    print(f"{'':42} {'ms':>8} {'ratio':>6} {'coll.':>6} {'MB sent':>8} {'loss error':>10} {'moments MB':>10}")
    for row in rows:
        error = "" if row["loss_error"] is None else f"{row['loss_error']:.1e}"
        print(
            f"{row['name']:42} {row['milliseconds']:8.1f} {row['ratio']:6.2f} {row['collective_share']:6.1%} "
            f"{row['gradient_bytes'] / 1e6:8.2f} {error:>10} {row['optimizer_bytes'] / 1e6:10.2f}"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"workers": args.workers, "rows": rows}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
