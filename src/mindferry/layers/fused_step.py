"""A training step on the kernels: AdamW in one pass over the parameters, the norm without copies of gradients.

Importing this module registers both classes with mindformers. `FusedAdamW` has AdamW's arguments, states and
state names; `FusedTrainOneStepCell` has MFTrainOneStepCell's arguments and outputs.
"""

from __future__ import annotations

import mindspore as ms
from mindformers.core.optim.adamw import AdamW
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import ops

from mindferry.layers.fused_ops import _operator


@MindFormerRegister.register(MindFormerModuleType.OPTIMIZER)
class FusedAdamW(AdamW):
    """mindformers' AdamW, each parameter updated in place in one pass.

    Inputs: gradients, and a factor [1] for them (loss scale and clipping); 1 when not given.
    """

    def __init__(
        self, params, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, swap=False
    ):
        super().__init__(params, learning_rate, betas, eps, weight_decay, swap)
        self.update = _operator("mf_adamw", [1], ms.float32)
        self.update.add_prim_attr("side_effect_mem", True)
        self.one = ms.Tensor([1.0], ms.float32)
        self.ones = ms.Tensor([1.0] * len(self._parameters), ms.float32)

    def construct(self, gradients, scale=None):
        weight_decay = self.get_weight_decay()
        lr = self.get_lr()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        step = ops.cast(self.global_step, ms.float32)
        scale = self.one if scale is None else ops.reshape(scale, (1,))
        corrections = (1.0 - ops.pow(self.beta1, step), 1.0 - ops.pow(self.beta2, step))
        shared = ops.concat((self.beta1, self.beta2, self.eps, *corrections, scale), 0)
        rates = self.each(lr, self.is_group_lr)
        decays = self.each(weight_decay, self.is_group)
        return self.update(
            shared, rates, decays, *self._parameters, *self.exp_avg, *self.exp_avg_sq, *gradients
        )

    def each(self, value, is_tuple):
        """One number or one a parameter -> float32 [k]."""
        if not is_tuple:
            return self.ones * ops.cast(value, ms.float32)
        return ops.concat(tuple([ops.reshape(ops.cast(item, ms.float32), (1,)) for item in value]), 0)


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class FusedTrainOneStepCell(MFTrainOneStepCell):
    """MFTrainOneStepCell whose gradients are read once for their norm and once by FusedAdamW, and never copied.

    An infinite or NaN gradient makes the norm so, and the step is skipped, as its overflow check does.

    Raises:
        TypeError: the optimizer is not FusedAdamW.
    """

    def __init__(self, network, optimizer, **kwargs):
        super().__init__(network, optimizer, **kwargs)
        if not isinstance(optimizer, FusedAdamW):
            raise TypeError(f"FusedTrainOneStepCell needs FusedAdamW, found {type(optimizer).__name__}")
        self.max_norm = float(kwargs.get("max_grad_norm", 1.0)) if kwargs.get("use_clip_grad") else None
        self.squares = _operator("mf_squares", [1], ms.float32)

    def construct(self, *inputs):
        sens = self.scale_sense
        loss, grads, factor = self.grads_for_mcore(sens, *inputs)
        grads = self.grad_reducer(grads)
        unscale = ops.reshape(ops.cast(1.0 / (sens * factor), ms.float32), (1,))
        squares = self.squares(*grads)
        overflow = self.process_loss_scale(ops.logical_not(ops.isfinite(squares[0])))
        norm = ops.sqrt(squares) * unscale
        global_norm = None
        scale = unscale
        if self.max_norm is not None:
            global_norm = ops.reshape(norm, ())
            # torch.nn.utils.clip_grad_norm_'s factor.
            scale = unscale * ops.minimum(self.max_norm / (norm + 1e-6), 1.0)
        learning_rate = self.learning_rate
        if self.optimizer.dynamic_lr:
            if self.optimizer.is_group_lr:
                learning_rate = self.learning_rate[-1](self.optimizer.global_step).reshape(())
            else:
                learning_rate = self.learning_rate(self.optimizer.global_step).reshape(())
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads, scale))
        return loss, overflow, sens, learning_rate, global_norm
