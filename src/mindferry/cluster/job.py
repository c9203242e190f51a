"""What a launch needs to know: hosts, devices, the training YAML and its grid of ranks."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError, printable
from mindferry.partition.layout import Grid, check_devices

MAX_HOSTS = 4096
# Host names and addresses go into a shell script: nothing else may.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|[0-9A-Fa-f:]{2,45}")
_LOCAL = ("localhost", "127.0.0.1", "::1", "0.0.0.0")  # noqa: S104 - names to refuse
NAME = "job.json"


@dataclass(frozen=True)
class LaunchJob:
    """A training on several hosts.

    Attributes:
        yaml: name of the training YAML in the run directory.
        hosts: names or addresses, in the order of their node numbers; the first is the master.
        devices_per_host: processes on each; msrun counts ranks as node x processes, so that all have as many.
        grid: the YAML's strategy.
    """

    yaml: str
    hosts: tuple[str, ...]
    devices_per_host: int
    port: int
    grid: Grid

    @property
    def workers(self) -> int:
        return len(self.hosts) * self.devices_per_host

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "hosts": list(self.hosts)}


def job_for(
    content: dict[str, Any], yaml: str, hosts: list[str], devices_per_host: int, port: int
) -> LaunchJob:
    """Judge the hosts, and take the grid from the YAML's content.

    Raises:
        UsageError: what cannot start: hosts, port, or a grid of another number of devices.
    """
    checked = check_hosts(hosts)
    if not 1024 <= port <= 65535:
        raise UsageError(f"--port {port}: expected 1024 to 65535", id="launch.port")
    parallel = content.get("parallel_config") or {}
    grid = Grid(
        *(int(parallel.get(key) or 1) for key in ("data_parallel", "model_parallel", "pipeline_stage"))
    )
    job = LaunchJob(yaml, checked, devices_per_host, port, grid)
    check_devices(grid, job.workers)
    return job


def check_hosts(hosts: list[str]) -> tuple[str, ...]:
    """The hosts, stripped.

    Raises:
        UsageError: none, one twice, one that is no host name or address, or this machine's own name for itself.
    """
    found: dict[str, int] = {}
    for number, host in enumerate((host.strip() for host in hosts), start=1):
        if not _HOST.fullmatch(host):
            raise UsageError(
                f"--hosts: host {number}: {printable(host)!r} is no host name or address", id="launch.hosts"
            )
        key = _canonical(host)
        if key in found:
            raise UsageError(
                f"--hosts: host {number}: {host} is host {found[key]}, too",
                cause="two node numbers on one machine would share its devices",
                remedy="name each host once; --devices-per-host says how many processes it gets",
                id="launch.hosts",
            )
        found[key] = number
    if not found or len(found) > MAX_HOSTS:
        raise UsageError(f"--hosts: {len(found)} hosts, expected 1 to {MAX_HOSTS}", id="launch.hosts")
    names = tuple(host.strip() for host in hosts)
    local = next((name for name in names if _canonical(name) in _LOCAL), None)
    if local and len(names) > 1:
        raise UsageError(
            f"--hosts: {local} means another machine on every host",
            remedy="give the address that the other hosts reach it by (ip addr)",
            id="launch.hosts",
        )
    return names


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


def hosts_file(path: Path) -> list[str]:
    """Hosts of a file, see hosts_in.

    Raises:
        UsageError: it is not there, no text, or larger than a list of hosts can be.
    """
    try:
        if path.stat().st_size > 1 << 20:
            raise UsageError(f"--hosts-file {path}: larger than 1 MiB", id="launch.hosts")
        return hosts_in(path.read_text(encoding="utf-8-sig"))
    except OSError as err:
        raise UsageError(f"--hosts-file {path}: {err.strerror}", id="launch.hosts") from None
    except UnicodeDecodeError as err:
        raise UsageError(f"--hosts-file {path}: byte {err.start} is no UTF-8", id="launch.hosts") from None


def hosts_in(text: str) -> list[str]:
    """Hosts of a list: one a line or separated by commas; `#` begins a comment, what follows a name is left out."""
    lines = (line.partition("#")[0].strip() for line in re.split(r"[\n,]", text))
    return [line.split()[0] for line in lines if line]


def read_job(folder: Path) -> LaunchJob:
    """The job that the launch files in `folder` are for.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        job = LaunchJob(
            yaml=str(content["yaml"]),
            hosts=check_hosts([str(host) for host in content["hosts"]]),
            devices_per_host=int(content["devices_per_host"]),
            port=int(content["port"]),
            grid=Grid(**content["grid"]),
        )
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file", remedy="write launch files first: mindferry launch RUN --hosts ...",
            id="launch.none",
        ) from None  # fmt: skip
    except (ValueError, KeyError, TypeError) as err:
        raise UsageError(
            f"{path}: damaged: {type(err).__name__}", remedy="write it again: mindferry launch RUN --hosts ...",
            id="launch.none",
        ) from None  # fmt: skip
    return job
