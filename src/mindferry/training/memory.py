"""Resident memory of this process, as the kernel counts it; imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path


def status_bytes(name: str) -> int:
    """VmHWM (peak) or VmRSS of this process in bytes, 0 if unknown; MindSpore's own counters are 0 on a CPU."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    match = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0
