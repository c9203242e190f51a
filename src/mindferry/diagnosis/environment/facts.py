"""What this machine and this Python are: read once, changed by nothing here."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

PACKAGES = ("mindspore", "mindformers", "numpy", "torch", "transformers", "decorator", "hyper-parallel")
_PROBE_SECONDS = 120


@dataclass
class Probe:
    """What importing and using the packages in a process of its own came to.

    Attributes:
        steps: name -> "ok", or the error's first line.
        died: the signal or exit code when the process ended before its last step, else "".
    """

    steps: dict[str, str] = field(default_factory=dict)
    died: str = ""
    output: str = ""


@dataclass
class Facts:
    """Everything the checks look at (bytes, counts, seconds).

    Attributes:
        requirements: package -> its own declared requirements (PEP 508 texts).
        path_python: the `python` that msrun would start, and its prefix.
        memory_bytes: what this process may use: the machine's, or the container's limit.
    """

    python: str = ""
    executable: str = ""
    prefix: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    requirements: dict[str, list[str]] = field(default_factory=dict)
    path_python: str = ""
    path_prefix: str = ""
    msrun: str = ""
    compilers: dict[str, str] = field(default_factory=dict)
    memory_bytes: int = 0
    memory_available_bytes: int = 0
    cgroup_memory_bytes: int | None = None
    cpus: int = 0
    cpus_allowed: int = 0
    cpu_quota: float | None = None
    disk_free_bytes: dict[str, int] = field(default_factory=dict)
    open_files: int = 0
    processes: int = 0
    now: float = 0.0
    installed_at: float = 0.0
    cann: str = ""
    cann_home: str = ""
    cann_sourced: bool = False
    driver: str = ""
    npus: int = 0
    nvidia: bool = False
    probes: dict[str, Probe] = field(default_factory=dict)
    kernels: tuple[str, str] = ("", "")

    @property
    def python_minor(self) -> str:
        return ".".join(self.python.split(".")[:2])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _cgroup(v2: str, v1: str) -> str:
    return _read(f"/sys/fs/cgroup/{v2}") or _read(f"/sys/fs/cgroup/{v1}")


def _memory_limit() -> int | None:
    text = _cgroup("memory.max", "memory/memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _cpu_quota() -> float | None:
    """CPUs' worth of time that the container may use, None when unlimited."""
    text = _read("/sys/fs/cgroup/cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None
    quota, period = (
        _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
        _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    )
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(quota) > 0 else None


def _prefix_of(python: str) -> str:
    """sys.prefix of another interpreter, "" when it does not answer."""
    if not python:
        return ""
    try:
        done = subprocess.run(
            [python, "-c", "import sys; print(sys.prefix)"], capture_output=True, timeout=20, text=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cann() -> tuple[str, str]:
    """(version, home) of the CANN toolkit, empty when there is none."""
    homes = [os.environ.get("ASCEND_TOOLKIT_HOME", ""), os.environ.get("ASCEND_HOME_PATH", "")]
    homes += [
        "/usr/local/Ascend/ascend-toolkit/latest",
        "/usr/local/Ascend/latest",
        "/usr/local/Ascend/nnrt/latest",
    ]
    for home in homes:
        if not home or not Path(home).is_dir():
            continue
        for name in ("version.cfg", "version.info", "compiler/version.info", "runtime/version.info"):
            match = re.search(r"\b(\d+\.\d+(?:\.(?:RC)?\d+)*[\w.]*)", _read(f"{home}/{name}"))
            if match:
                return match.group(1), home
        return "unknown", home
    return "", ""


def _installed_at(name: str) -> float:
    try:
        files = metadata.files(name) or []
        path = next((item.locate() for item in files if item.name == "METADATA"), None)
        return os.path.getmtime(str(path)) if path else 0.0
    except (metadata.PackageNotFoundError, OSError):
        return 0.0


def _free(paths: list[Path]) -> dict[str, int]:
    found = {}
    for path in paths:
        try:
            found[str(path)] = shutil.disk_usage(path).free
        except OSError:
            continue
    return found


_STEPS = """\
import json, sys
def step(name, body):
    try:
        body()
        said = "ok"
    except BaseException as err:
        said = (type(err).__name__ + ": " + str(err)).strip().replace("\\n", " ")[:300]
    print("MINDFERRY-STEP " + json.dumps([name, said]), flush=True)
def mindspore():
    import numpy as np
    import mindspore as ms
    from mindspore import ops
    ms.set_device("CPU")
    got = ops.reshape(ms.Tensor(np.ones((2, 3)), ms.float32) * 2, (3, 2)).asnumpy()
    assert got.sum() == 12.0
def torch():
    import torch
    assert float(torch.ones(2, 3).matmul(torch.ones(3, 2)).sum()) == 12.0
def mindformers():
    import mindformers
for name in sys.argv[1:]:
    step(name, globals()[name])
"""


def run_probe(names: list[str]) -> Probe:
    """Import and use the packages, in this order, in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="mindferry-doctor-") as folder:
        env = {**os.environ, "GLOG_v": "3", "LOG_MF_PATH": folder, "TOKENIZERS_PARALLELISM": "false"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", _STEPS, *names],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_PROBE_SECONDS,
                env=env,
                cwd=folder,
            )
            text, code = done.stdout.decode("utf-8", "replace"), done.returncode
        except subprocess.TimeoutExpired as err:
            text, code = (err.stdout or b"").decode("utf-8", "replace"), -99
    steps = {}
    for line in text.splitlines():
        if line.startswith("MINDFERRY-STEP "):
            name, said = json.loads(line.removeprefix("MINDFERRY-STEP "))
            steps[name] = said
    died = ""
    if len(steps) < len(names):
        died = f"no answer in {_PROBE_SECONDS} s" if code == -99 else f"exit code {code}"
    return Probe(steps, died, text[-4000:])


_KERNELS = """\
import json
from mindferry.kernels import state
found = state()
print("MINDFERRY-STEP " + json.dumps([found.usable, found.reason, found.threads, found.bf16]), flush=True)
"""


def kernel_state() -> tuple[str, str]:
    """("ready", what) or ("failing", reason) of mindferry's kernels, built and self-tested in a child process.

    The first call compiles them into the user's cache, as the first training would.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _KERNELS], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300
        )
    except subprocess.TimeoutExpired:
        return "failing", "they were not built within 300 s"
    text = done.stdout.decode("utf-8", "replace")
    line = next((row for row in text.splitlines() if row.startswith("MINDFERRY-STEP ")), None)
    if line is None:
        last = text.strip().splitlines()[-1:] or ["no output"]
        return "failing", f"exit code {done.returncode}: {last[0][:200]}"
    usable, reason, threads, native = json.loads(line.removeprefix("MINDFERRY-STEP "))
    if not usable:
        return "failing", str(reason)
    return "ready", f"{threads} threads, bfloat16 {'in hardware' if native else 'emulated'}"


def gather(run: Path | None = None, probe: bool = True) -> Facts:
    """Look at everything; with `probe`, packages are imported in processes of their own (some seconds)."""
    import psutil

    packages = {name: version for name in PACKAGES if (version := _version(name))}
    requirements: dict[str, list[str]] = {}
    for name in ("mindspore", "mindformers"):
        if name in packages:
            requirements[name] = list(metadata.requires(name) or [])
    memory = psutil.virtual_memory()
    limit = _memory_limit()
    path_python = shutil.which("python") or ""
    cann, home = _cann()
    root = Path(run) if run else Path.cwd()
    facts = Facts(
        python=sys.version.split()[0],
        executable=sys.executable,
        prefix=sys.prefix,
        packages=packages,
        requirements=requirements,
        path_python=path_python,
        path_prefix=_prefix_of(path_python),
        msrun=shutil.which("msrun") or "",
        compilers={name: shutil.which(name) or "" for name in ("g++", "make")},
        memory_bytes=min(memory.total, limit or memory.total),
        memory_available_bytes=min(memory.available, limit or memory.available),
        cgroup_memory_bytes=limit,
        cpus=os.cpu_count() or 1,
        cpus_allowed=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        disk_free_bytes=_free([root, Path("/tmp"), Path("/dev/shm")]),  # noqa: S108
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        now=time.time(),
        installed_at=max(_installed_at(name) for name in ("mindspore", "mindformers", "numpy")),
        cann=cann,
        cann_home=home,
        cann_sourced=bool(os.environ.get("ASCEND_OPP_PATH") or os.environ.get("ASCEND_HOME_PATH")),
        driver=_read("/usr/local/Ascend/driver/version.info").partition("\n")[0].partition("=")[2],
        npus=len(list(Path("/dev").glob("davinci[0-9]*"))),
        nvidia=Path("/proc/driver/nvidia/version").exists(),
    )
    if probe:
        facts.kernels = kernel_state()
    if probe and "mindspore" in packages:
        chain = ["mindspore", "mindformers"] if "mindformers" in packages else ["mindspore"]
        facts.probes["alone"] = run_probe(chain)
        if "torch" in packages:
            facts.probes["with torch"] = run_probe(["mindspore", "torch"])
            facts.probes["torch first"] = run_probe(["torch", "mindspore"])
    return facts
