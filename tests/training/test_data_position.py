"""Where a resumed run goes on in the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindferry.errors import UsageError
from mindferry.training.checkpoints import Checkpoint
from mindferry.training.engine import _data_position


def at(step: int, batch: int, rows: int) -> Checkpoint:
    state = {"samples": step * batch, "global_batch_size": batch, "steps_per_epoch": rows // batch}
    return Checkpoint(Path(f"step-{step:08d}"), step, state)


def test_no_checkpoint_and_the_same_batch() -> None:
    assert _data_position(None, 2, 5) == 0
    assert _data_position(at(3, 2, 10), 2, 5) == 3
    assert _data_position(at(13, 2, 10), 2, 5) == 13


def test_another_batch_counts_in_samples() -> None:
    """Ten rows, stopped after six: a batch of 3 has passed 2 steps; across epochs only if they end alike."""
    assert _data_position(at(3, 2, 10), 3, 3) == 2
    assert _data_position(at(6, 2, 12), 4, 3) == 3
    assert _data_position(at(8, 2, 12), 4, 3) == 4
    with pytest.raises(UsageError, match="6 sequences were trained on in steps of 2; in steps of 4"):
        _data_position(at(3, 2, 10), 4, 2)
    with pytest.raises(UsageError, match="no step begins there"):
        _data_position(at(6, 2, 10), 3, 3)
