"""Run the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer: `python -m tests.kernels.sanitized`.

What is given after it goes to pytest in place of the two test files. A library of its own is built beside the
ordinary one (the flags are part of its name), so nothing else notices.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
RUNTIMES = ("libasan.so", "libubsan.so")


def runtimes(compiler: str = "g++") -> list[str]:
    """Paths of the sanitizers' runtime libraries of this g++; [] when it has none or does not exist."""
    found = []
    for name in RUNTIMES:
        if shutil.which(compiler) is None:
            return []
        asked = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
        if not Path(path).is_absolute() or not Path(path).exists():  # g++ repeats a name it does not find
            return []
        found.append(path)
    return found


def environment(libraries: list[str]) -> dict[str, str]:
    """The environment of a process whose kernels are built with the sanitizers and end it at the first finding."""
    return {
        **os.environ,
        "CXX": "g++",
        "MINDFERRY_SANITIZE": "1",
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch leave memory behind at exit, and are not linked with ASan themselves.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:abort_on_error=0",
        # Without halt_on_error UBSan prints and goes on, and the tests pass.
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }


def main(arguments: list[str]) -> int:
    """Run pytest; its exit code, or 0 with a line when the sanitizers are missing."""
    libraries = runtimes()
    if not libraries:
        print("sanitize: skipped, g++ with its libasan and libubsan is not installed")
        return 0
    chosen = arguments or [str(HERE / "test_layer.py"), str(HERE / "test_parts.py")]
    # A finding ends the process: what pytest had captured of file descriptor 2 would be lost.
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(command, env=environment(libraries), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
