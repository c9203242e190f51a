"""Watches overflows: single ones are normal, a scale that only falls is a fault."""

from __future__ import annotations

from dataclasses import dataclass

from mindferry.errors import MindferryError

# Overflows in a row that a static scale is given; it cannot get better by itself.
PATIENCE = 8


@dataclass
class ScaleWatch:
    """Counts skipped updates and says when a run no longer learns.

    Attributes:
        dynamic: the scale falls at each overflow.
        floor: where a dynamic scale stops falling.
        skipped: updates left out so far.
    """

    dynamic: bool = False
    floor: float = 1.0
    skipped: int = 0
    _row: int = 0
    _first: int = 0

    def see(self, step: int, overflow: bool, scale: float, loss: float | None = None) -> None:
        """Note the outcome of optimizer step `step`, run with `scale`.

        Raises:
            MindferryError: no update comes through any more.
        """
        if not overflow:
            self._row = 0
            return
        self.skipped += 1
        self._row += 1
        if self._row == 1:
            self._first = step
        stuck = scale <= self.floor if self.dynamic else self._row >= PATIENCE
        if not stuck:
            return
        fallen = (
            f"the loss scale fell to its floor {self.floor:g}" if self.dynamic else f"loss scale {scale:g}"
        )
        raise MindferryError(
            f"step {step}: gradients overflow in every step since step {self._first} "
            f"({self._row} in a row, {fallen}, loss {loss}); no update comes through",
            cause="weights, data or learning rate give infinities or NaN; no loss scale can cure that",
            remedy="go back to a checkpoint from before "
            f"step {self._first}, use bfloat16 or float32 instead of float16, or lower the learning rate",
            id="train.overflow",
        )
