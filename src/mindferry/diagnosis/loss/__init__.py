"""A sick loss, in the article's order: data, precision, learning rate, gradients (section 5.2)."""

from __future__ import annotations

from mindferry.diagnosis.loss.band import Band
from mindferry.diagnosis.loss.examine import Examination, examine
from mindferry.diagnosis.loss.step import Step

__all__ = ["Band", "Examination", "Step", "examine"]
