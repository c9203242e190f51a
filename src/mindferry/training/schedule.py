"""Learning rates by table: computed once in float64, looked up by step.

mindformers computes its schedules on the device in float32, where 1 + cos loses digits near the end, and has
no class for nanoGPT's or gpt-neox's warm-up, Megatron-LM's decays or transformers' warmup_stable_decay shapes.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from mindferry.recipes.schedule import table
from mindferry.targets.run_yaml import TABLED, schedule_from


@MindFormerRegister.register(MindFormerModuleType.LR)
class TabledLR(LearningRateSchedule):
    """rate(step) of a mindferry.spec.Schedule; steps past its end keep the rate of the last.

    Takes run.yaml's lr_schedule keys. Input: global_step int32, () or [1]. Output: float32, of its shape.
    """

    def __init__(self, **block: Any):
        super().__init__()
        schedule = schedule_from({"type": TABLED, **block})
        assert schedule is not None
        # one more than the run: MFLossMonitor asks for the step after the last
        rates = table(schedule, schedule.total_steps + 1)
        self.last = int(rates.size - 1)
        self.rates = ms.Tensor(rates.astype(np.float32))

    def construct(self, global_step):
        """Look the rate up."""
        return ops.gather(self.rates, ops.minimum(global_step, self.last), 0)
