"""Optimizers that a source may have and mindformers' grouping cannot say, and the one that shares its states out."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindformers.core.optim.adamw import AdamW  # core.optim.AdamW is a factory
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn, ops

from mindferry.errors import UsageError
from mindferry.training.reduction import BUCKET_MIB, buckets


@MindFormerRegister.register(MindFormerModuleType.OPTIMIZER)
class AdamWDecayAll(AdamW):
    """mindformers' AdamW with the same decay on every tensor, as torch.optim.AdamW(model.parameters()).

    mindformers puts 1-D tensors and biases into a group with decay 0 before it builds the optimizer.
    """

    def __init__(
        self, params, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, swap=False,
        use_fused=False,
    ):  # fmt: skip
        if use_fused:
            raise UsageError(
                "optimizer: use_fused: the fused AdamW of mindformers cannot be told to decay every tensor",
                remedy="set use_fused to False",
                id="optimizer.fused",
            )
        groups = [{**group, "weight_decay": weight_decay} for group in params]
        super().__init__(groups, learning_rate, betas, eps, weight_decay, swap)


class _Bucket(nn.Cell):
    """Parameters of one weight decay in one flat line, cut into as many equal parts as there are processes.

    Inputs: see construct. The new values of this process' part are gathered from all, and assigned.
    """

    def __init__(self, indices, parameters, decay, rank, ranks):
        super().__init__(auto_prefix=False)
        self.indices, self.decay = indices, decay
        self.parameters = [parameters[index] for index in indices]
        self.names = [parameter.name for parameter in self.parameters]
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.sizes = [parameter.size for parameter in self.parameters]
        self.length = -(-sum(self.sizes) // ranks)
        self.padding = self.length * ranks - sum(self.sizes)
        self.begin, self.end = rank * self.length, (rank + 1) * self.length
        self.gather = ops.AllGather()

    def own(self, tensors):
        """This process' part of the flat line, float32 [length]."""
        parts = [ops.reshape(ops.cast(tensor, ms.float32), (-1,)) for tensor in tensors]
        if self.padding:
            parts.append(ops.zeros((self.padding,), ms.float32))
        return ops.concat(parts, 0)[self.begin : self.end]

    def construct(self, gradients, first, second, beta1, beta2, eps, step, rate):
        """AdamW as mindformers computes it: decay first, then the step with both moments corrected.

        Args: gradients of the bucket; both moments [length]; the rest are scalars or [1].
        """
        gradient = self.own(gradients)
        value = self.own(self.parameters) * (1.0 - rate * self.decay)
        mean = first * beta1 + gradient * (1.0 - beta1)
        square = second * beta2 + gradient * gradient * (1.0 - beta2)
        value = ops.depend(value, ops.assign(first, mean))
        value = ops.depend(value, ops.assign(second, square))
        scale = ops.sqrt(square / (1.0 - ops.pow(beta2, step))) + eps
        value = value - mean / scale * (rate / (1.0 - ops.pow(beta1, step)))
        everything = self.gather(value)
        done = everything[:1]
        begin = 0
        for index in range(len(self.sizes)):
            part = ops.reshape(everything[begin : begin + self.sizes[index]], self.shapes[index])
            parameter = self.parameters[index]
            done = ops.depend(done, ops.assign(parameter, ops.cast(part, parameter.dtype)))
            begin += self.sizes[index]
        return done


class _Gather(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.gather = ops.AllGather()

    def construct(self, part):
        return self.gather(part)


@MindFormerRegister.register(MindFormerModuleType.OPTIMIZER)
class ShardedAdamW(AdamW):
    """AdamW whose moments are shared out: each of N processes keeps and updates 1/N of them (ZeRO stage 1).

    MindSpore's own parallel optimizer does this in semi-automatic parallelism only; in data-parallel mode it
    shares out the work, but every process still allocates all moments.

    Args:
        decay_all: decay 1-D tensors and biases, too (see AdamWDecayAll).

    Raises:
        UsageError: learning rate or weight decay of a group is a schedule of its own.
    """

    def __init__(
        self, params, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, swap=False,
        decay_all=False,
    ):  # fmt: skip
        from mindspore.communication import get_group_size, get_rank

        if decay_all:
            params = [{**group, "weight_decay": weight_decay} for group in params]
        self.rank, self.ranks = get_rank(), get_group_size()
        super().__init__(params, learning_rate, betas, eps, weight_decay, swap)
        if self.is_group_lr or self.dynamic_weight_decay:
            raise UsageError(
                "parallel.enable_parallel_optimizer: parameter groups with schedules of their own are not shared out",
                remedy="set it to False",
                id="optimizer.sharded-groups",
            )

    def clone_state(self, prefix, init):
        """This process' part of a state: one flat parameter a bucket. AdamW's constructor calls it."""
        if not hasattr(self, "buckets"):
            self.buckets = nn.CellList(self._cut())
        zeros = [np.zeros(bucket.length, np.float32) for bucket in self.buckets]
        return ms.ParameterTuple(
            [
                ms.Parameter(ms.Tensor(values), name=f"{prefix}.bucket_{index}", requires_grad=False)
                for index, values in enumerate(zeros)
            ]
        )

    def _cut(self):
        decays = self.weight_decay if self.is_group else [self.weight_decay] * len(self.parameters)
        decays = [float(decay) for decay in decays]
        found = []
        for decay in sorted(set(decays)):
            chosen = [index for index, other in enumerate(decays) if other == decay]
            sizes = [self.parameters[index].size for index in chosen]
            for group in buckets(sizes, BUCKET_MIB * 2**20 // 4):
                indices = [chosen[place] for place in group]
                found.append(_Bucket(indices, self.parameters, decay, self.rank, self.ranks))
        return found

    def construct(self, gradients):
        rate = self.get_lr()
        self.assignadd(self.global_step, self.global_step_increase_tensor)
        done: tuple = ()
        for index in range(len(self.exp_avg)):
            bucket = self.buckets[index]
            chosen: tuple = ()
            for place in bucket.indices:
                chosen = (*chosen, gradients[place])
            state = (self.exp_avg[index], self.exp_avg_sq[index])
            done = (*done, bucket(chosen, *state, self.beta1, self.beta2, self.eps, self.global_step, rate))
        return done

    def gathered(self, keep):
        """Moments by AdamW's names, in its shapes; all processes must call it at the same time.

        Args:
            keep: whether this process wants them; the others only give theirs.
        """
        gather, found = _Gather(), {}
        for prefix, states in (("adam_m", self.exp_avg), ("adam_v", self.exp_avg_sq)):
            for bucket, state in zip(self.buckets, states, strict=True):
                line = gather(state * 1.0).asnumpy()
                if keep:
                    ends = np.cumsum(bucket.sizes)
                    for name, shape, size, end in zip(
                        bucket.names, bucket.shapes, bucket.sizes, ends, strict=True
                    ):
                        found[f"{prefix}.{name}"] = line[end - size : end].reshape(shape).copy()
        return found

    def restore(self, saved):
        """Take this process' part of moments as `gathered` names them.

        Raises:
            KeyError: with the name of a moment that is missing or has another shape.
        """
        for prefix, states in (("adam_m", self.exp_avg), ("adam_v", self.exp_avg_sq)):
            for bucket, state in zip(self.buckets, states, strict=True):
                line = np.zeros(bucket.length * self.ranks, np.float32)
                begin = 0
                for name, shape, size in zip(bucket.names, bucket.shapes, bucket.sizes, strict=True):
                    value = saved.get(f"{prefix}.{name}")
                    if value is None or tuple(value.shape) != tuple(shape):
                        raise KeyError(f"{prefix}.{name}")
                    line[begin : begin + size] = value.reshape(-1)
                    begin += size
                state.set_data(ms.Tensor(line[bucket.begin : bucket.end]))
