"""Whether launch files would start: read and judged, and as far as no NPU is needed, run."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.cluster import files
from mindferry.cluster.job import LaunchJob
from mindferry.errors import MindferryError
from mindferry.findings import Finding
from mindferry.partition.layout import Grid
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory

# Processes of a dry run; each is a MindSpore of some 500 MB.
MAX_DRY = 8


@dataclass
class DryRun:
    """What the processes of a dry run found.

    Attributes:
        ranks: what cluster.rank.rehearse returned, by rank.
        grid: theirs; smaller than the job's where it has more than MAX_DRY ranks.
    """

    grid: Grid
    ranks: list[dict[str, Any]] = field(default_factory=list)


def static(run: RunDirectory, job: LaunchJob, resolve: bool = False) -> list[Finding]:
    """Judge the launch files in RUN/launch without starting anything.

    Args:
        resolve: look host names up, too.
    """
    content = run_yaml.read(run.root / job.yaml)
    return [
        *_changed(run.root / files.FOLDER, job),
        *_hosts(job, resolve),
        *_yaml(run, job, content),
        *_weights(run, job, content),
    ]


def _changed(folder: Path, job: LaunchJob) -> Iterator[Finding]:
    for name, text in files.texts(job).items():
        path = folder / name
        if name == "environment.sh" and path.is_file():
            continue
        if not path.is_file():
            yield Finding(
                "launch.missing",
                "problem",
                f"{path}: no such file",
                remedy="write the files again: mindferry launch",
            )
        elif path.read_text(encoding="utf-8") != text:
            yield Finding(
                "launch.changed",
                "warning",
                f"{path}: was changed since it was written, or belongs to other hosts",
                remedy="mindferry launch RUN --hosts ... writes it again; your own settings belong in environment.sh",
            )
    for name in ("start.sh", "environment.sh"):
        path = folder / name
        if not path.is_file():
            continue
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            first = done.stderr.strip().splitlines()[:1]
            yield Finding(
                "launch.syntax", "problem", f"{path}: {first[0] if first else 'bash cannot read it'}"
            )


def _hosts(job: LaunchJob, resolve: bool) -> Iterator[Finding]:
    try:
        ipaddress.ip_address(job.hosts[0])
    except ValueError:
        yield Finding(
            "launch.master-name",
            "warning",
            f"the master is named {job.hosts[0]}: every host must resolve it to the same address",
            "msrun decides by its address whether it runs on the master",
            "give the address instead",
        )
    for host in job.hosts if resolve else ():
        try:
            socket.getaddrinfo(host, job.port)
        except OSError as err:
            yield Finding(
                "launch.resolve", "warning", f"{host}: this machine cannot resolve it: {err.strerror or err}"
            )
    if job.devices_per_host % job.grid.model_parallel:
        yield Finding(
            "launch.tensor-across-hosts",
            "warning",
            f"model_parallel {job.grid.model_parallel} does not divide the {job.devices_per_host} devices of a host: "
            "matrices are shared between hosts",
            "tensor parallelism sends activations twice a layer; between hosts that is slow",
            "choose a model_parallel that divides it: mindferry plan --check",
        )


def _yaml(run: RunDirectory, job: LaunchJob, content: dict[str, Any]) -> Iterator[Finding]:
    """The keys that a cluster needs, and the planner's rules."""
    from mindferry.planning import constraints, runfile

    path = run.root / job.yaml
    if content["context"]["device_target"] != "Ascend":
        yield Finding(
            "launch.device",
            "problem",
            f"{path}: context.device_target: found {content['context']['device_target']}, expected Ascend",
            remedy="mindferry migrate ... --cut writes a run.cluster.yaml; on a CPU: mindferry train RUN --workers N",
        )
    if job.workers > 1 and not content.get("use_parallel"):
        yield Finding(
            "launch.parallel",
            "problem",
            f"{path}: use_parallel: found False, expected True for {job.workers} processes",
            cause="each would train the whole model by itself",
        )
    read = runfile.read(path, job.workers)
    read.layout.devices_per_host = job.devices_per_host
    for violation in [*read.unread, *constraints.check(read.layout)]:
        yield Finding(
            f"plan.{violation.rule}",
            "problem",
            f"{path}: {violation.message}",
            remedy="mindferry plan --check",
        )


def _weights(run: RunDirectory, job: LaunchJob, content: dict[str, Any]) -> Iterator[Finding]:
    where = content.get("load_checkpoint")
    if not where or content.get("auto_trans_ckpt"):
        return
    root = (run.root / where).resolve()
    missing = [rank for rank in range(job.workers) if not (root / f"rank_{rank}").is_dir()]
    if missing:
        yield Finding(
            "launch.weights",
            "problem",
            f"{root}: rank_{missing[0]} is not there ({len(missing)} of {job.workers} are missing)",
            remedy=f"mindferry reshard RUN --to {job.grid} --out {Path(where).name}",
        )


def smaller(grid: Grid, most: int = MAX_DRY) -> Grid:
    """The grid with as few replicas, then stages, then shares, as fit in `most` ranks."""
    dp, mp, pp = grid.data_parallel, grid.model_parallel, grid.pipeline_stage
    while dp * mp * pp > most:
        if dp > 1:
            dp = _next_divisor(dp)
        elif pp > 1:
            pp = _next_divisor(pp)
        else:
            mp = _next_divisor(mp)
    return Grid(dp, mp, pp)


def _next_divisor(value: int) -> int:
    return next(value // factor for factor in range(2, value + 1) if value % factor == 0)


def dry_run(run: RunDirectory, job: LaunchJob, folder: Path) -> DryRun:
    """Run start.sh itself on this machine, on CPUs: msrun, the ranks' numbers and groups, YAML, weights, data.

    Raises:
        MindferryError: a rank failed; its own error is the message.
    """
    from mindferry.launching.msrun import Job

    grid = smaller(job.grid)
    launch = run.root / files.FOLDER
    start = ["env", "BIND_CORE=--bind_core=False", "bash", str(launch / "start.sh"), "0"]
    real = Job(launch / "rank.py", folder, grid.ranks, start=start)
    request = {
        "run": str(run.root), "yaml": job.yaml, "grid": vars(grid), "workers": grid.ranks, "real_workers": job.workers,
    }  # fmt: skip
    found = DryRun(grid, real.run(request))
    classes = {rank["configuration"] for rank in found.ranks}
    if len(classes) != 1:
        raise MindferryError(
            f"the ranks read different configurations: {sorted(classes)}", id="launch.different"
        )
    return found
