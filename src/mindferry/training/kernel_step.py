"""A training step on the kernels: AdamW in one pass over the parameters, the norm without copies of gradients.

`train` takes both with layer_spec fused on a CPU (see training.engine). Importing this registers them with mindformers.
"""

from __future__ import annotations

import mindspore as ms
from mindformers.core.optim.adamw import AdamW  # core.optim.AdamW is a factory
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn, ops

from mindferry.layers.fused_ops import _operator
from mindferry.training.wrappers import PortableTrainOneStepCell, UpdateStep


@MindFormerRegister.register(MindFormerModuleType.OPTIMIZER)
class KernelAdamW(AdamW):
    """mindformers' AdamW with its states and state names, each parameter updated in place in one pass.

    Inputs: gradients, and a factor [1] for them (loss scale and clipping); 1 when not given.

    Args:
        decay_all: decay 1-D tensors and biases, too (see optimizers.AdamWDecayAll).
    """

    def __init__(
        self, params, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, swap=False,
        decay_all=False,
    ):  # fmt: skip
        if decay_all:
            params = [{**group, "weight_decay": weight_decay} for group in params]
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


class Norm(nn.Cell):
    """Global norm of gradients that are `divisor` times too large, and the factor that undoes that and clips.

    Input: tuple of gradients, divisor [1]. Output: norm [1], factor [1] (torch.nn.utils.clip_grad_norm_'s), and
    whether a gradient is infinite or not a number, bool []. Squares are summed in float32's range: a norm above
    1.8e19 counts as infinite, too.
    """

    def __init__(self, max_norm):
        super().__init__(auto_prefix=False)
        self.max_norm = ms.Tensor([max_norm], ms.float32)
        self.one = ms.Tensor([1.0], ms.float32)
        self.squares = _operator("mf_squares", [1], ms.float32)

    def construct(self, gradients, divisor):
        squares = self.squares(*gradients)
        norm = ops.sqrt(squares) / divisor
        factor = ops.minimum(self.max_norm / (norm + 1e-6), self.one) / divisor
        return norm, factor, ops.logical_not(ops.isfinite(squares[0]))


class KernelUpdateStep(UpdateStep):
    """UpdateStep that reads the totals twice, for their norm and for AdamW, and copies them never."""

    def __init__(self, owner, micro):
        super().__init__(owner, micro)
        self.norm = owner.norm
        self.zeros = [ops.ZerosLike() for _ in self.totals]

    def construct(self, loss_total, weight_total, weight):
        loss = loss_total / weight_total
        scale = self.scale * 1.0
        divisor = ops.reshape(scale * weight, (1,))
        norm, factor, overflow = self.norm(self.totals, divisor)
        if self.manager is not None:
            overflow = self.manager(self.scale, overflow)
        rate = self.learning_rate
        if self.optimizer.dynamic_lr:
            # The schedule at global_step, before the optimizer raises it.
            rate = ops.reshape(self.learning_rate(self.optimizer.global_step), ())
        if not overflow:
            loss = ops.depend(loss, self.optimizer(self.totals, factor))
        for index in range(len(self.zeros)):
            zero = self.zeros[index](ops.depend(self.totals[index], loss))
            loss = ops.depend(loss, ops.assign(self.totals[index], zero))
        loss = ops.depend(loss, ops.assign(self.loss_total, ops.zeros_like(loss)))
        loss = ops.depend(loss, ops.assign(self.weight_total, ops.zeros_like(loss)))
        return loss, overflow, scale, rate, norm


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class KernelTrainOneStepCell(PortableTrainOneStepCell):
    """PortableTrainOneStepCell whose gradients are read once for their norm and once by KernelAdamW.

    An infinite or NaN gradient makes the norm so, and the step is skipped, as its overflow check does.

    Raises:
        TypeError: the optimizer is not KernelAdamW.
    """

    def __init__(self, network, optimizer, **kwargs):
        super().__init__(network, optimizer, **kwargs)
        if not isinstance(optimizer, KernelAdamW):
            raise TypeError(f"KernelTrainOneStepCell needs KernelAdamW, found {type(optimizer).__name__}")
        self.norm = Norm(self.clip_grad_norm.max_norm.asnumpy()[0])
        if self.micro is not None:
            self.update = KernelUpdateStep(self, self.micro)

    def construct(self, *inputs):
        scale = self.scale_sense * 1.0
        loss, grads, factor = self.grads_for_mcore(scale, *inputs)
        norm, clip, overflow = self.norm(grads, ops.reshape(ops.cast(scale * factor, ms.float32), (1,)))
        overflow = self.process_loss_scale(overflow)
        rate = self.learning_rate
        if self.optimizer.dynamic_lr:
            rate = ops.reshape(self.learning_rate(self.optimizer.global_step), ())
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads, clip))
        return loss, overflow, scale, rate, norm
