"""MindSpore's own LossMonitor and TimeMonitor, known by name in run.yaml's callbacks.

mindformers' registry has only its own MFLossMonitor. These print what scripts around older runs read: one line
`epoch: 1 step: 1, loss is 5.68` a step and `Train epoch time: ... ms, per step time: ... ms` an epoch.
"""

from __future__ import annotations

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore.train import callback


class LossMonitor(callback.LossMonitor):
    """MindSpore's, with the loss as a number: mindformers' step returns it as a line of one."""

    def step_end(self, run_context):
        parameters = run_context.original_args()
        outputs = parameters.net_outputs
        loss = outputs[0] if isinstance(outputs, (tuple, list)) else outputs
        parameters.net_outputs = loss.reshape(())
        try:
            super().step_end(run_context)
        finally:
            parameters.net_outputs = outputs


for _monitor in (LossMonitor, callback.TimeMonitor):
    MindFormerRegister.register_cls(_monitor, MindFormerModuleType.CALLBACK)
