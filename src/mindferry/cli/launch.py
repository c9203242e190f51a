"""mindferry launch"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.errors import UsageError

if TYPE_CHECKING:
    from mindferry.cluster.check import DryRun
    from mindferry.cluster.job import LaunchJob

EXAMPLE = "Example: mindferry launch run/ --hosts 10.0.0.1,10.0.0.2 --devices-per-host 2"
CLUSTER_YAML = "run.cluster.yaml"


@command("launch")
def launch(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory; `migrate --cut` writes its YAML."),
    hosts: str | None = typer.Option(None, "--hosts", metavar="A,B", help="Hosts; the first is the master."),
    hosts_file: Path | None = typer.Option(
        None, "--hosts-file", metavar="FILE", help="The same, one a line."
    ),
    devices_per_host: int = typer.Option(8, "--devices-per-host", min=1, max=1024, help="Processes a host."),
    yaml: str | None = typer.Option(
        None,
        "--yaml",
        metavar="NAME",
        help="Training YAML in RUN; run.cluster.yaml if it is there, else run.yaml.",
    ),
    port: int = typer.Option(8118, "--port", help="TCP port of the master."),
    check: bool = typer.Option(
        False, "--check", help="Judge RUN/launch as it is, and start it here on CPUs."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Write what starts a training on several hosts of Ascend devices: start.sh, hosts, ranks, environment.

    --check starts start.sh on this machine, on CPUs: everything up to the first operator that needs an NPU.
    """
    from mindferry.cluster import check as checks
    from mindferry.cluster import files
    from mindferry.cluster import job as jobs
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    if check:
        if hosts or hosts_file:
            raise UsageError(
                "--check reads the hosts from RUN/launch; give no --hosts with it", id="launch.hosts"
            )
        job = jobs.read_job(directory.root / files.FOLDER)
    else:
        name = yaml or (CLUSTER_YAML if (directory.root / CLUSTER_YAML).is_file() else "run.yaml")
        names = jobs.hosts_in(hosts or "") + (jobs.hosts_file(hosts_file) if hosts_file else [])
        content = run_yaml.read(directory.root / name)
        job = jobs.job_for(content, name, names, devices_per_host, port)
        files.write(directory.root / files.FOLDER, job, str(run))
    findings = checks.static(directory, job, resolve=check)
    dry = None
    if check and not any(item.severity == "problem" for item in findings):
        with (
            tempfile.TemporaryDirectory(prefix="mindferry-launch-") as folder,
            Progress("starting", total=None, unit="ranks"),
        ):
            dry = checks.dry_run(directory, job, Path(folder))
    bad = any(item.severity == "problem" for item in findings)
    return Result("problem" if bad else "good", findings, _extra(job, dry), _text(job, dry, run, check))


def _extra(job: LaunchJob, dry: DryRun | None) -> dict[str, Any]:
    found = {"grid": str(dry.grid), "ranks": dry.ranks} if dry else None
    return {"job": job.to_json(), "workers": job.workers, "dry_run": found}


def _text(job: LaunchJob, dry: DryRun | None, run: Path, check: bool) -> str:
    lines = [f"{job.workers} ranks ({job.grid}) on {len(job.hosts)} hosts, {job.yaml}"]
    if dry is not None:
        first = dry.ranks[0]
        less = f" (of {job.grid}: no more than fit here)" if dry.grid != job.grid else ""
        lines.append(
            f"started here on CPUs as {dry.grid}{less}: msrun, rank numbers, communication groups, "
            f"{first['configuration']}, {first['weights']} tensors of weights and {first['rows']} sequences for rank 0"
        )
        lines.append("not tried, for want of NPUs: HCCL between the hosts, the graph, the training itself")
    if not check:
        lines += [
            f"on {host}: bash {run / 'launch/start.sh'} {node}" for node, host in enumerate(job.hosts[:16])
        ]
        if len(job.hosts) > 16:
            lines.append(f"... and on the other {len(job.hosts) - 16}, see {run / 'launch/hosts.txt'}")
        lines.append(f"before that, here: mindferry launch {run} --check")
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    app.command("launch", epilog=EXAMPLE)(launch)
