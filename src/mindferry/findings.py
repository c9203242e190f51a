"""What any part noticed, in the one form that people and programs are shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was noticed, in the form that `--json` promises."""

    id: str
    severity: Severity
    message: str
    cause: str = ""
    remedy: str = ""
    evidence: str = ""
