"""The training step without Ascend's overflow register."""

from __future__ import annotations

import mindspore as ms
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import ops

_overflowed = ops.MultitypeFuncGraph("overflowed")
_is_finite = ops.IsFinite()
_smallest = ops.ReduceMin()


@_overflowed.register("Tensor")
def _overflowed_tensor(gradient):
    """1.0 when an element is infinite or not a number, else 0.0."""
    return 1.0 - _smallest(ops.cast(_is_finite(gradient), ms.float32))


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class PortableTrainOneStepCell(MFTrainOneStepCell):
    """MFTrainOneStepCell with overflow found by looking at the gradients, as its INFNAN mode does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.each = ops.HyperMap()

    def start_overflow_check(self, pre_cond, compute_input):
        return pre_cond, compute_input

    def get_overflow_status(self, status, compute_output):
        return ops.AddN()(self.each(_overflowed, compute_output)) > 0.0
