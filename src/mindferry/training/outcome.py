"""What a training session did, for whoever started it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Outcome:
    """What a training session did.

    Attributes:
        losses: loss of each step of this session, by step number.
        signal: number of the signal that ended the session early, or 0.
        skipped: steps whose gradients overflowed; their batches were read, but nothing was learned.
        notes: what ran otherwise than run.yaml says, and why.
        optimizer_bytes: size of the optimizer's states in this process.
    """

    first_step: int = 0
    last_step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    signal: int = 0
    checkpoint: Path | None = None
    skipped: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    optimizer_bytes: int = 0
