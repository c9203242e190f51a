"""When overflows are normal and when they are a fault."""

from __future__ import annotations

import pytest

from mindferry.errors import MindferryError
from mindferry.training.loss_scale import PATIENCE, ScaleWatch


def test_a_scale_that_only_falls_is_reported() -> None:
    """65536 halved at each step reaches 1 after 16 steps."""
    watch, scale = ScaleWatch(dynamic=True), 65536.0
    watch.see(1, False, scale)
    for step in range(2, 18):
        watch.see(step, True, scale)
        scale /= 2
    assert scale == 1.0
    with pytest.raises(MindferryError, match=r"every step since step 2 .*fell to its floor 1") as caught:
        watch.see(18, True, scale, float("nan"))
    assert "bfloat16" in caught.value.remedy


def test_overflows_at_the_start_are_normal() -> None:
    """fp16 runs start with a scale that is too high on purpose."""
    watch = ScaleWatch(dynamic=True)
    for step in range(1, 1003):
        watch.see(step, step <= 2, 65536.0 / 4 ** min(step, 2))
    assert watch.skipped == 2


def test_megatrons_start_from_two_to_the_32() -> None:
    watch, scale = ScaleWatch(dynamic=True), 2.0**32
    for step in range(1, 20):
        watch.see(step, True, scale)
        scale /= 2
    watch.see(20, False, scale)
    assert watch.skipped == 19


def test_a_static_scale_is_given_some_patience() -> None:
    watch = ScaleWatch()
    for step in range(1, PATIENCE):
        watch.see(step, True, 1024.0)
    with pytest.raises(MindferryError, match=f"{PATIENCE} in a row, loss scale 1024"):
        watch.see(PATIENCE, True, 1024.0)


def test_one_overflow_is_a_note_only() -> None:
    watch = ScaleWatch()
    for step in range(1, 100):
        watch.see(step, step == 37, 1.0)
    assert watch.skipped == 1
