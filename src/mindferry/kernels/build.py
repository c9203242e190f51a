"""Build the C++ kernels for this machine, once, into the user's cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libmindferry_kernels.so"
ONEDNN = "libdnnl.so.3"
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_SECONDS = 600

FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-pthread",
)
# Added to FLAGS when MINDFERRY_SANITIZE=1; docs/performance.md has the whole command.
SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize=vptr")


class KernelsUnavailable(Exception):
    """The kernels cannot be used here; the text says why and what would help."""


@dataclass(frozen=True)
class Toolchain:
    """What a build depends on besides the sources.

    Attributes:
        compiler: path of the C++ compiler; version: its own first line.
        cpu: model name and instruction-set flags, as -march=native follows them.
    """

    compiler: str
    version: str
    cpu: str
    mindspore: str
    onednn: Path


def cpu_description() -> str:
    """Model name and flags of the first processor in /proc/cpuinfo; '' where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [
        line for line in text.split("\n\n", 1)[0].splitlines() if line.startswith(("model name", "flags"))
    ]
    return "\n".join(lines)


def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices itself (AVX512-BF16 or AMX)."""
    return bool(re.search(r"\b(avx512_bf16|amx_bf16)\b", cpu_description()))


def toolchain() -> Toolchain:
    """Find compiler and oneDNN.

    Raises:
        KernelsUnavailable: not Linux on x86-64, no compiler, or no MindSpore with its oneDNN.
    """
    if not sys.platform.startswith("linux") or os.uname().machine != "x86_64":
        raise KernelsUnavailable(
            f"kernels are for Linux on x86_64, this is {sys.platform} on {os.uname().machine}"
        )
    asked = os.environ.get("CXX")
    names = (asked,) if asked else COMPILERS
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelsUnavailable(f"no C++ compiler found ({', '.join(names)}); install g++ 9 or later")
    try:
        shown = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
        version = shown.stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError) as err:
        raise KernelsUnavailable(f"{compiler} --version failed: {err}") from None
    spec = util.find_spec("mindspore")
    if spec is None or not spec.submodule_search_locations:
        raise KernelsUnavailable("MindSpore is not installed")
    onednn = Path(spec.submodule_search_locations[0]) / "lib" / ONEDNN
    if not onednn.exists():
        raise KernelsUnavailable(f"this MindSpore has no oneDNN: {onednn} is missing")
    return Toolchain(compiler, version, cpu_description(), metadata.version("mindspore"), onednn)


def cache_root() -> Path:
    """$MINDFERRY_CACHE, else mindferry/ under $XDG_CACHE_HOME or ~/.cache."""
    asked = os.environ.get("MINDFERRY_CACHE")
    if asked:
        return Path(asked)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mindferry"


def flags() -> tuple[str, ...]:
    """Compiler flags of this process's kernels."""
    return (*FLAGS, *SANITIZE) if os.environ.get("MINDFERRY_SANITIZE") == "1" else FLAGS


def key(tools: Toolchain, flags: tuple[str, ...] = FLAGS) -> str:
    """Names a build: sources, compiler, flags, CPU, MindSpore and its oneDNN."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (
        tools.compiler,
        tools.version,
        " ".join(flags),
        tools.cpu,
        tools.mindspore,
        str(tools.onednn),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def built_library(tools: Toolchain, flags: tuple[str, ...] = FLAGS) -> Path:
    """Path of the shared library, building it first where the cache lacks it.

    A lock keeps two processes from building at once; the library appears under its name only when complete.

    Raises:
        KernelsUnavailable: the cache cannot be written, or the compiler fails.
    """
    from filelock import FileLock

    directory = cache_root() / "kernels" / key(tools, flags)
    target = directory / LIBRARY
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(str(directory) + ".lock", timeout=TIMEOUT_SECONDS):
            if not target.exists():
                with tempfile.TemporaryDirectory(dir=directory) as work:
                    fresh = compile_library(tools, flags, Path(work))
                    os.replace(fresh, target)
    except (OSError, TimeoutError) as err:
        raise KernelsUnavailable(f"cannot write the kernel cache {directory}: {err}") from None
    return target


def compile_library(tools: Toolchain, flags: tuple[str, ...], work: Path) -> Path:
    """Compile every source into `work` and link; returns the library."""
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [work / f"{source.stem}.o" for source in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        _run([tools.compiler, *flags, "-c", str(pair[0]), "-o", str(pair[1])])

    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, zip(sources, objects, strict=True)))
    library = work / LIBRARY
    rpath = f"-Wl,-rpath,{tools.onednn.parent}"
    _run(
        [tools.compiler, *flags, "-shared", *map(str, objects), "-o", str(library), str(tools.onednn), rpath]
    )
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.SubprocessError) as err:
        raise KernelsUnavailable(f"{command[0]} could not run: {err}") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise KernelsUnavailable(f"{command[0]} failed: {lines[0] if lines else 'no message'}")
