"""Training steps for mindformers: gradient accumulation anywhere, and overflow without Ascend's register."""

from __future__ import annotations

import mindspore as ms
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper.wrapper import MFTrainOneStepCell
from mindspore import nn, ops

from mindferry.targets.run_yaml import NO_CLIPPING
from mindferry.training.reduction import BUCKET_MIB, GradientExchange

_overflowed = ops.MultitypeFuncGraph("overflowed")
_is_finite = ops.IsFinite()
_smallest = ops.ReduceMin()


@_overflowed.register("Tensor")
def _overflowed_tensor(gradient):
    """1.0 when an element is infinite or not a number, else 0.0."""
    return 1.0 - _smallest(ops.cast(_is_finite(gradient), ms.float32))


_add_gradient = ops.MultitypeFuncGraph("add_gradient")
_taken = ops.MultitypeFuncGraph("taken")
_squares = ops.MultitypeFuncGraph("squares")
_times = ops.MultitypeFuncGraph("times")
_square_sum = ops.ReduceSum()


@_add_gradient.register("Tensor", "Tensor")
def _add_to(total, gradient):
    return ops.assign_add(total, ops.cast(gradient, ms.float32))


@_taken.register("Tensor", "Tensor")
def _take(divisor, total):
    """total / divisor, and total set to 0 afterwards."""
    value = total / divisor
    zero = ops.zeros_like(ops.depend(total, value))
    return ops.depend(value, ops.assign(total, zero))


@_squares.register("Tensor")
def _square(gradient):
    return ops.reshape(_square_sum(ops.square(ops.cast(gradient, ms.float32))), (1,))


@_times.register("Tensor", "Tensor")
def _scale(factor, gradient):
    return ops.cast(ops.cast(gradient, ms.float32) * factor, gradient.dtype)


class ClipGlobalNorm(nn.Cell):
    """torch.nn.utils.clip_grad_norm_: gradients times min(1, max_norm / (norm + 1e-6)).

    mindformers 1.9.0 adds the 1e-6 to max(norm, max_norm), and so scales what it should leave alone.
    Input: tuple of gradients. Output: the clipped ones, and their norm before [1] float32.
    """

    def __init__(self, max_norm):
        super().__init__()
        self.max_norm = ms.Tensor([max_norm], ms.float32)
        self.one = ms.Tensor([1.0], ms.float32)
        self.each = ops.HyperMap()

    def construct(self, gradients):
        norm = ops.sqrt(ops.addn(self.each(_squares, gradients)))
        factor = ops.minimum(self.max_norm / (norm + 1e-6), self.one)
        return self.each(ops.partial(_times, factor), gradients), norm


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class FlooredLossScale(nn.DynamicLossScaleUpdateCell):
    """nn.DynamicLossScaleUpdateCell with a floor other than 1.

    An overflow divides the scale by scale_factor, not below scale_floor; scale_window steps in a row without one
    multiply it. That is torch.amp.GradScaler with growth_factor = 1 / backoff_factor.
    """

    def __init__(self, loss_scale_value, scale_factor=2.0, scale_window=1000, scale_floor=1.0):
        super().__init__(loss_scale_value, scale_factor, scale_window)
        self.minimum_loss_scale = ms.Tensor(scale_floor, ms.float32)


class MicroStep(nn.Cell):
    """Forward and backward of one micro-batch; adds weight * gradient to the totals.

    The weight is 1, or the number of unmasked tokens: the network's loss is a mean over them, so mean * count is
    the sum that per-token averaging needs.
    """

    def __init__(self, network, weights, totals, scale, per_token):
        super().__init__(auto_prefix=False)
        self.network = network
        self.weights, self.totals, self.scale = weights, totals, scale
        self.per_token = per_token
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.each = ops.HyperMap()
        self.loss_total = ms.Parameter(ms.Tensor([0.0], ms.float32), "step_total.loss", requires_grad=False)
        self.weight_total = ms.Parameter(
            ms.Tensor([0.0], ms.float32), "step_total.weight", requires_grad=False
        )
        self.one = ms.Tensor([1.0], ms.float32)

    def construct(self, input_ids, labels, loss_mask, position_ids):
        """Returns this micro-batch's mean loss [1]."""
        inputs = (input_ids, labels, loss_mask, position_ids)
        parts = self.network(*inputs)
        loss = ops.reshape(parts[0] + parts[1] + parts[2] + parts[3], (1,))
        weight = self.one
        if self.per_token:
            weight = ops.reshape(ops.ReduceSum()(ops.cast(loss_mask, ms.float32)), (1,))
        sens: tuple = ()
        for part in parts:
            sens = (*sens, ops.ones_like(part) * ops.cast(ops.reshape(self.scale * weight, ()), part.dtype))
        gradients = self.grad(self.network, self.weights)(*inputs, sens)
        loss = ops.depend(loss, self.each(_add_gradient, self.totals, gradients))
        loss = ops.depend(loss, ops.assign_add(self.loss_total, loss * weight))
        return ops.depend(loss, ops.assign_add(self.weight_total, weight))


class UpdateStep(nn.Cell):
    """What MFTrainOneStepCell does once the gradients are there, on the totals of the micro-steps.

    On several processes the totals are already the mean over them (see mindferry.training.reduction).
    """

    def __init__(self, owner, micro):
        super().__init__(auto_prefix=False)
        # Not as child cells: the owner has them already.
        self.optimizer, self.clip = owner.optimizer, owner.clip_grad_norm
        self.learning_rate, self.manager = owner.learning_rate, owner.loss_scaling_manager
        self.totals, self.scale = micro.totals, owner.scale_sense
        self.loss_total, self.weight_total = micro.loss_total, micro.weight_total
        self.each = ops.HyperMap()

    def construct(self, loss_total, weight_total, weight):
        """Returns loss [1], overflow, loss scale used, learning rate used, gradient norm before clipping.

        Args: the sums over all processes, and the mean weight of a process, each [1].
        """
        loss = loss_total / weight_total
        scale = self.scale * 1.0
        gradients = self.each(ops.partial(_taken, ops.reshape(scale * weight, ())), self.totals)
        # An infinity of one process has reached all of them.
        overflow = ops.AddN()(self.each(_overflowed, gradients)) > 0.0
        if self.manager is not None:
            overflow = self.manager(self.scale, overflow)
        gradients, norm = self.clip(gradients)
        rate = self.learning_rate
        if self.optimizer.dynamic_lr:
            # The schedule at global_step, before the optimizer raises it.
            rate = ops.reshape(self.learning_rate(self.optimizer.global_step), ())
        if not overflow:
            loss = ops.depend(loss, self.optimizer(gradients))
        loss = ops.depend(loss, ops.assign(self.loss_total, ops.zeros_like(loss)))
        loss = ops.depend(loss, ops.assign(self.weight_total, ops.zeros_like(loss)))
        return loss, overflow, scale, rate, norm


# Prefixes of parameters that are zero between steps: no checkpoint needs them.
TRANSIENT = "step_total."


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class AccumulatingTrainOneStepCell(MFTrainOneStepCell):
    """MFTrainOneStepCell that cuts its batch into `micro_batches` and updates once.

    Args:
        micro_batches: how many; the rows of the batch must divide by it.
        per_token_loss: weigh micro-batches by their unmasked tokens instead of alike.
        gradient_wire_dtype: float32, or float16 to send half the bytes between processes.
        bucket_mib: gradients go between processes in pieces of this size (float32 MiB).
        reduce_every_micro_batch: average gradients after each micro-batch instead of once a step; the same
            sum, `micro_batches` times the traffic. It is there to measure what accumulation saves.
    """

    def __init__(
        self,
        *args,
        micro_batches=1,
        per_token_loss=False,
        gradient_wire_dtype="float32",
        bucket_mib=BUCKET_MIB,
        reduce_every_micro_batch=False,
        **kwargs,
    ):
        # The norm is always measured; MindSpore cannot return None from a graph that branches.
        max_grad_norm = kwargs.get("max_grad_norm", 1.0) if kwargs.get("use_clip_grad") else NO_CLIPPING
        super().__init__(*args, **{**kwargs, "use_clip_grad": True})
        self.clip_grad_norm = ClipGlobalNorm(max_grad_norm)
        self.micro_batches = micro_batches
        self.micro: MicroStep | None = None
        self.exchange: GradientExchange | None = None
        # Set by the DropoutByStep callback where the network has dropout.
        self.dropout_counter: ms.Parameter | None = None
        if micro_batches > 1 or self.reducer_flag:
            totals = self.weights.clone(prefix="step_total", init="zeros")
            for total in totals:
                total.requires_grad = False
            self.micro = MicroStep(self.network, self.weights, totals, self.scale_sense, per_token_loss)
            self.update = UpdateStep(self, self.micro)
        if self.reducer_flag:
            self.exchange = GradientExchange(
                totals, self.degree, gradient_wire_dtype, bucket_mib, reduce_every_micro_batch
            )

    def __call__(self, *inputs):
        """One optimizer step; with micro-batches, a compiled graph each for the micro-step and the update, so
        that compile time and memory do not grow with their number."""
        if self.micro is None:
            return super().__call__(*inputs)
        rows = inputs[0].shape[0] // self.micro_batches
        for number in range(self.micro_batches):
            if number and self.dropout_counter is not None:
                self.dropout_counter.set_data(self.dropout_counter + 1)
            part = self.micro(*(value[number * rows : (number + 1) * rows] for value in inputs))
            if self.exchange is not None:
                self.exchange.computed(part, last=number + 1 == self.micro_batches)
        loss, weight = self.micro.loss_total, self.micro.weight_total
        if self.exchange is None:
            return self.update(loss * 1.0, weight * 1.0, weight * 1.0)
        return self.update(*self.exchange.sums(loss, weight))


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class PortableTrainOneStepCell(AccumulatingTrainOneStepCell):
    """AccumulatingTrainOneStepCell with overflow found by looking at the gradients, as its INFNAN mode does."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.each = ops.HyperMap()

    def start_overflow_check(self, pre_cond, compute_input):
        # A copy: the scale is a parameter, and the step reports the one it used, not the one it leaves.
        return pre_cond, compute_input * 1.0

    def get_overflow_status(self, status, compute_output):
        return ops.AddN()(self.each(_overflowed, compute_output)) > 0.0
