"""What one of the four steps found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from mindferry.findings import Finding

STEPS = ("data", "precision", "learning-rate", "gradients")


@dataclass
class Step:
    """One step of the triage.

    Attributes:
        verdict: "culprit" when a finding of the step is a problem; "unknown" when it could not look.
        summary: one line of what was looked at and seen.
        evidence: the numbers behind it, for --json.
    """

    name: str
    verdict: Literal["good", "culprit", "unknown"] = "good"
    summary: str = ""
    findings: list[Finding] = field(default_factory=list)
    evidence: dict[str, Any] = field(default_factory=dict)

    def add(self, item: Finding) -> None:
        """Keep a finding; a problem makes this step the culprit."""
        self.findings.append(item)
        if item.severity == "problem":
            self.verdict = "culprit"
