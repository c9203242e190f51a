"""The checks of `doctor env`: each takes facts and says what is wrong. Nothing here looks at the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mindferry.diagnosis.environment import versions
from mindferry.diagnosis.environment.facts import Facts
from mindferry.diagnosis.environment.needs import Needs
from mindferry.diagnosis.environment.versions import Release
from mindferry.findings import Finding

MIN_OPEN_FILES = 1024
MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 2 << 30  # importing mindformers and compiling a graph take about 1 GiB
MIN_SHM_BYTES = 64 << 20


@dataclass
class Check:
    """One numbered line of the report."""

    name: str
    detail: str = ""
    findings: list[Finding] = field(default_factory=list)
    skipped: bool = False

    @property
    def mark(self) -> str:
        worst = {item.severity for item in self.findings}
        for severity, mark in (("problem", "FAIL"), ("warning", "warn")):
            if severity in worst:
                return mark
        return "skip" if self.skipped else "ok"


def _wanted(facts: Facts, target: str | None) -> Release | None:
    """The release the report is about: --for, else the installed one, else the newest that pip can install."""
    if target:
        return versions.release(target)
    installed = facts.packages.get("mindformers")
    row = versions.release(installed) if installed else None
    return row or versions.best(facts.python_minor)


def _way_out(facts: Facts, row: Release | None) -> str:
    """A pip line that works on this Python."""
    if row is not None and not versions.obstacles(row, facts.python_minor):
        return versions.pip_line(row)
    other = versions.best(facts.python_minor)
    if other is None:
        return f"no release has wheels for Python {facts.python_minor}; make an environment with Python 3.11"
    return versions.pip_line(other)


def check_python(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """Is there any release for this Python?"""
    best = versions.best(facts.python_minor)
    if best is None:
        yield Finding(
            "env.python",
            "problem",
            f"Python {facts.python}: no release of mindformers and MindSpore can be installed with pip",
            cause="PyPI has MindSpore wheels for Python 3.9 to 3.12",
            remedy="make an environment with Python 3.11: python3.11 -m venv VENV",
        )


def check_pair(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """Do the installed mindformers and MindSpore go together, and are they what --for asks?"""
    formers, spore = facts.packages.get("mindformers"), facts.packages.get("mindspore")
    wanted = _wanted(facts, target)
    for name, version in (("mindspore", spore), ("mindformers", formers)):
        if version is None:
            yield Finding(
                f"env.no-{name}",
                "problem",
                f"{name} is not installed in {facts.prefix}",
                remedy=_way_out(facts, wanted),
            )
    if target and wanted is not None:
        yield from _target(facts, wanted)
    if not formers or not spore:
        return
    fit = versions.fits(formers, spore)
    if fit is None:
        near = versions.partners(spore)
        remedy = (
            f"for mindspore {spore}: mindformers {near[0].mindformers}" if near else _way_out(facts, wanted)
        )
        yield Finding(
            "env.unknown-pair",
            "warning",
            f"mindformers {formers} is not in the table; whether it goes with mindspore {spore} is unknown",
            remedy=remedy,
        )
    elif not fit:
        row = versions.release(formers)
        assert row is not None
        near = versions.partners(spore)
        other = f", or mindformers {near[0].mindformers} for this mindspore" if near else ""
        yield Finding(
            "env.wrong-pair",
            "problem",
            f"mindformers {formers} needs mindspore {' or '.join(row.mindspore)}, found {spore}",
            cause=f"each release goes with one MindSpore; names that one imports are missing in another ({row.source})",
            remedy=f"{_way_out(facts, row)}{other}",
        )
    elif not versions.release(formers).stable:  # type: ignore[union-attr]
        row = versions.release(formers)
        yield Finding("env.unstable-pair", "warning", f"mindformers {formers}: {row.source}" if row else "")


def _target(facts: Facts, row: Release) -> Iterator[Finding]:
    """What --for's release needs, and whether pip can give it."""
    needed = f"mindspore {row.mindspore[0]}, Python {' or '.join(row.python)}, CANN {row.cann}"
    needed += f", driver {row.driver}" if row.driver else ""
    blocked = versions.obstacles(row, facts.python_minor)
    if not blocked:
        yield Finding(
            "env.target",
            "info",
            f"mindformers {row.mindformers} needs {needed}",
            remedy=versions.pip_line(row),
            evidence=row.source,
        )
        return
    other = versions.best(facts.python_minor)
    way = f"installable here: {versions.pip_line(other)}" if other else "make an environment with Python 3.11"
    if row.gpt2 and other:
        way += " (it has no GPT-2 of its own; `mindferry migrate` brings one)"
    yield Finding(
        "env.target-not-installable",
        "problem",
        f"mindformers {row.mindformers} cannot be installed with pip on Python {facts.python_minor}: "
        + "; ".join(blocked),
        cause=f"it needs {needed} ({row.source})",
        remedy=way,
    )


def check_numpy(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """NumPy against what MindSpore's wheel was compiled with."""
    spore, numpy = facts.packages.get("mindspore"), facts.packages.get("numpy")
    if not spore or not numpy:
        return
    for rule in versions.undeclared():
        name, _, bound = rule.needs.partition("<")
        if (
            name == "numpy"
            and versions.satisfies(spore, rule.versions)
            and not versions.satisfies(numpy, f"<{bound}")
        ):
            yield Finding(
                "env.numpy-2",
                "problem",
                f'numpy {numpy} is installed, mindspore {spore} needs "{rule.needs}"',
                cause=f"{rule.why}; the first operator would end in a SystemError",
                remedy=f'pip install "{rule.needs}"',
            )


def check_requirements(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """What the installed mindspore and mindformers themselves declare."""
    from packaging.requirements import InvalidRequirement, Requirement

    from mindferry.diagnosis.environment.facts import _version

    for owner, texts in facts.requirements.items():
        broken = []
        for text in texts:
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            found = facts.packages.get(wanted.name.lower()) or _version(wanted.name)
            if found is None:
                broken.append(f"{wanted.name}{wanted.specifier} (missing)")
            elif not versions.satisfies(found, str(wanted.specifier)):
                broken.append(f"{wanted.name}{wanted.specifier} (found {found})")
        if broken:
            yield Finding(
                "env.requirements",
                "warning",
                f"{owner} asks for {', '.join(broken[:6])}",
                cause="another package was installed later and moved it",
                remedy=f"pip install {owner}=={facts.packages[owner]} again, or these versions by name",
            )


def check_decorator(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """Graph kernel fusion needs a package that MindSpore does not declare."""
    if "mindspore" in facts.packages and "decorator" not in facts.packages:
        yield Finding(
            "env.decorator",
            "problem" if needs.graph_kernel else "warning",
            "the package `decorator` is missing",
            cause="context.enable_graph_kernel starts a process that imports it; MindSpore does not declare it",
            remedy="pip install decorator",
        )


def check_msrun(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """msrun starts whatever `python` is first on PATH."""
    if not facts.path_python:
        message = "there is no `python` on PATH"
    elif facts.path_prefix != facts.prefix:
        message = f"`python` on PATH is {facts.path_python}, not the one of {facts.prefix}"
    else:
        return
    yield Finding(
        "env.msrun-python",
        "problem" if needs.parallel else "warning",
        message,
        cause="msrun starts the first `python` of PATH for every rank; packages of this environment are not in it",
        remedy=f"source {facts.prefix}/bin/activate before msrun",
    )


def check_imports(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """What the packages did in processes of their own."""
    from mindferry.diagnosis.startup import diagnose

    alone = facts.probes.get("alone")
    if alone is None:
        return
    for name, said in alone.steps.items():
        if said != "ok":
            known = diagnose([said])[0]
            yield Finding(
                "env.import",
                "problem",
                f"{name} cannot be used: {said}",
                known.cause,
                known.remedy,
                alone.output[-600:],
            )
    if alone.died:
        yield Finding(
            "env.import",
            "problem",
            f"the process that imports mindspore ended without a word ({alone.died})",
            cause="a native library crashed",
            remedy="reinstall mindspore; run `python -X faulthandler -c 'import mindspore'` to see where",
            evidence=alone.output[-600:],
        )
    for order in ("with torch", "torch first"):
        other = facts.probes.get(order)
        failing = other and (other.died or next((s for s in other.steps.values() if s != "ok"), ""))
        if other and failing and not alone.died and all(said == "ok" for said in alone.steps.values()):
            yield Finding(
                "env.torch-clash",
                "warning",
                f"torch and mindspore in one process ({order}): {failing}",
                cause="both bring OpenMP and C++ libraries; the order of import decides which are loaded",
                remedy="import the other one first, or keep them in separate environments; `verify` needs both",
                evidence=other.output[-600:],
            )


def check_compiler(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """A C++ compiler and make."""
    missing = [name for name, path in facts.compilers.items() if not path]
    if missing:
        yield Finding(
            "env.no-compiler",
            "problem" if needs.fused else "warning",
            f"no {' and no '.join(missing)} on PATH",
            cause="mindferry's fused kernels and mindformers' Megatron index helpers are compiled at first use",
            remedy="apt-get install g++ make; without it use layer_spec: portable",
        )


def check_kernels(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """mindferry's own kernels."""
    state, detail = facts.kernels
    if state == "failing":
        yield Finding(
            "env.kernels",
            "problem" if needs.fused else "warning",
            f"the fused kernels cannot be used: {detail}",
            remedy="use layer_spec: portable, or remove the build from the cache and try again",
        )


def check_memory(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """Memory for the run."""
    wanted = max(needs.memory_bytes, MIN_MEMORY_BYTES)
    if facts.memory_available_bytes < wanted:
        of = (
            "weights, gradients and optimizer states"
            if needs.memory_bytes > MIN_MEMORY_BYTES
            else "MindSpore alone"
        )
        where = " (the container's limit)" if facts.cgroup_memory_bytes else ""
        yield Finding(
            "env.memory",
            "problem",
            f"{facts.memory_available_bytes / 1e9:.1f} GB of memory are free{where}, {of} need {wanted / 1e9:.1f} GB",
            cause="activations come on top",
            remedy="free memory, raise the limit, or take a smaller model or batch",
        )


def check_disk(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """Disk for checkpoints, and shared memory for dataset workers."""
    places = iter(facts.disk_free_bytes.items())
    first = next(places, None)
    wanted = max(needs.disk_bytes, MIN_FREE_BYTES)
    if first and first[1] < wanted:
        yield Finding(
            "env.disk",
            "problem" if needs.disk_bytes else "warning",
            f"{first[0]}: {first[1] / 1e9:.1f} GB free, expected at least {wanted / 1e9:.1f} GB",
            cause="each checkpoint holds weights and two moments; one more exists while it is written",
            remedy="free space, or lower keep_checkpoint_max",
        )
    shared = facts.disk_free_bytes.get("/dev/shm")  # noqa: S108
    if shared is not None and shared < MIN_SHM_BYTES * max(1, needs.workers):
        yield Finding(
            "env.shm",
            "warning",
            f"{shared / 1e6:.0f} MB are free in shared memory (/dev/shm)",
            cause="dataset workers hand batches over through it; when it is full they die with a bus error",
            remedy="start the container with --shm-size=2g, or python_multiprocessing: False",
        )


def check_limits(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """CPU affinity, CPU quota, descriptors, clock."""
    usable = min(facts.cpus_allowed, facts.cpu_quota or facts.cpus_allowed)
    if usable < facts.cpus:
        reason = "affinity" if facts.cpus_allowed < facts.cpus else "the container's quota"
        yield Finding(
            "env.cpus",
            "info",
            f"{usable:g} of {facts.cpus} CPUs may be used ({reason})",
            cause="libraries that start one thread for each CPU of the machine then wait for each other",
            remedy=f"OMP_NUM_THREADS={max(1, int(usable))}, and no more dataset workers than that",
        )
    if needs.workers > 2 * usable:
        yield Finding(
            "env.workers",
            "warning",
            f"num_parallel_workers is {needs.workers}, {usable:g} CPUs may be used",
            remedy=f"set it to {max(1, int(usable))} to {max(1, int(2 * usable))}",
        )
    if 0 <= facts.open_files < MIN_OPEN_FILES:
        yield Finding(
            "env.open-files",
            "warning",
            f"at most {facts.open_files} open files are allowed",
            remedy="ulimit -n 65536 in the shell that starts the run",
        )
    if facts.installed_at > facts.now + 86400:
        yield Finding(
            "env.clock",
            "warning",
            "the clock is behind the time at which the packages were installed",
            cause="logs of several hosts cannot be put in order, and builds are repeated or skipped",
            remedy="set the clock (timedatectl, ntp)",
        )


def check_device(facts: Facts, needs: Needs, target: str | None) -> Iterator[Finding]:
    """CANN and driver, when the run wants Ascend or the machine has one."""
    wanted = _wanted(facts, target)
    if needs.device != "Ascend" and not facts.npus:
        if needs.device == "GPU":
            yield Finding(
                "env.gpu",
                "problem",
                "context.device_target is GPU",
                cause="mindformers supports Ascend; the wheels on PyPI have no CUDA backend",
                remedy="set it to CPU or Ascend",
            )
        return
    table = (
        f"CANN {wanted.cann}" + (f" and driver {wanted.driver}" if wanted and wanted.driver else "")
        if wanted
        else "CANN"
    )
    if not facts.npus:
        yield Finding(
            "env.no-npu",
            "problem",
            "run.yaml asks for Ascend, this machine has no /dev/davinci*",
            remedy="set context.device_target to CPU, or use an Ascend machine (containers need --device)",
        )
    if not facts.cann:
        yield Finding(
            "env.no-cann",
            "problem",
            "CANN is not installed (or not where it is looked for)",
            remedy=f"install {table}, then source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        )
        return
    if not facts.cann_sourced:
        yield Finding(
            "env.cann-not-sourced",
            "problem",
            f"CANN {facts.cann} is installed in {facts.cann_home}, its environment is not set",
            remedy=f"source {facts.cann_home}/../set_env.sh",
        )
    if wanted and facts.cann != "unknown" and not _cann_fits(facts.cann, wanted.cann):
        yield Finding(
            "env.cann-version",
            "problem",
            f"mindspore {wanted.mindspore[0]} wants CANN {wanted.cann}, found {facts.cann}",
            cause=f"({wanted.source})",
            remedy=f"install {table}",
        )


def _cann_fits(found: str, wanted: str) -> bool:
    """8.0.RC2 and 8.0.RC2.alpha001 go for one release, as version.cfg and the table write it differently."""
    one, other = found.upper(), wanted.upper().removesuffix(".BETA1")
    return one.startswith(other) and not one[len(other) :][:1].isdigit()


Judge = Callable[[Facts, Needs, "str | None"], Iterator[Finding]]

CHECKS: tuple[tuple[str, Judge], ...] = (
    ("Python", check_python),
    ("mindformers and MindSpore go together", check_pair),
    ("NumPy fits MindSpore's wheel", check_numpy),
    ("what the packages themselves ask for", check_requirements),
    ("packages load and compute", check_imports),
    ("graph kernel's undeclared package", check_decorator),
    ("msrun's python is this one", check_msrun),
    ("compiler", check_compiler),
    ("fused kernels", check_kernels),
    ("device, CANN and driver", check_device),
    ("memory", check_memory),
    ("disk", check_disk),
    ("CPU, file and clock limits", check_limits),
)


def _detail(name: str, facts: Facts) -> str:
    """What was found, for the report's line."""
    got = facts.packages
    gigabytes = 1e9
    details = {
        "Python": f"{facts.python} ({facts.prefix})",
        "mindformers and MindSpore go together": f"mindformers {got.get('mindformers', 'absent')}, "
        f"mindspore {got.get('mindspore', 'absent')}",
        "NumPy fits MindSpore's wheel": got.get("numpy", "absent"),
        "graph kernel's undeclared package": f"decorator {got.get('decorator', 'absent')}",
        "msrun's python is this one": facts.path_python or "none",
        "compiler": ", ".join(path or f"no {tool}" for tool, path in facts.compilers.items()),
        "fused kernels": " ".join(facts.kernels).strip(),
        "device, CANN and driver": f"{facts.npus} Ascend devices, CANN {facts.cann or 'absent'}",
        "memory": f"{facts.memory_available_bytes / gigabytes:.1f} of {facts.memory_bytes / gigabytes:.1f} GB free",
        "disk": ", ".join(
            f"{path} {free / gigabytes:.1f} GB" for path, free in facts.disk_free_bytes.items()
        ),
        "CPU, file and clock limits": f"{facts.cpus_allowed} CPUs, {facts.open_files} files",
    }
    return details.get(name, "")


def judge(facts: Facts, needs: Needs | None = None, target: str | None = None) -> list[Check]:
    """All checks on `facts`; `needs` narrows what matters to one run, `target` is --for's version."""
    made = []
    for name, check in CHECKS:
        skipped = (name == "packages load and compute" and not facts.probes) or (
            name == "fused kernels" and not facts.kernels[0]
        )
        found = list(check(facts, needs or Needs(), target))
        made.append(Check(name, _detail(name, facts), found, skipped))
    return made
