"""The kernels as MindSpore operators: forward and gradient, in graph and PyNative mode.

Every cell here has no parameters of its own; weights are inputs, so gradients reach them.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from mindferry import kernels
from mindferry.kernels.library import pack
from mindferry.kernels.settings import LayerSettings


def _operator(name, shape, dtype, bprop=None):
    """An AOT custom operator of the kernel library."""
    return ops.Custom(f"{kernels.load().path}:{name}", shape, dtype, "aot", bprop=bprop)


class LayerOp(nn.Cell):
    """One whole transformer layer.

    Inputs: hidden_states [S, B, H] float32, the fourteen parameters in the order of
    LayerSettings.parameter_shapes(), and cos and sin [2, S, rotary_half]. What the layer does not have is
    `absent`, any tensor: a bprop needs a fixed number of inputs in graph mode.
    Output: hidden_states [S, B, H] float32 and what is kept for the backward pass.
    """

    def __init__(self, settings: LayerSettings):
        super().__init__()
        packed = settings.packed()
        library = kernels.load()
        self.settings = ms.Tensor(packed)

        def forward_shape(_, x, *rest):
            return list(x), [library.kept_bytes(packed, x[0], x[1])]

        def backward_shape(_, x, *rest):
            return tuple(list(shape) for shape in (x, *rest[:14]))

        self.forward_op = _operator("mf_layer_forward", forward_shape, lambda _, x, *rest: (x, ms.uint8))
        self.backward_op = _operator("mf_layer_backward", backward_shape, lambda _, x, *rest: (x,) * 15)

    def construct(self, x, g1, b1, wq, bq, wp, bp, g2, b2, w1, c1, w2, c2, gq, gk, rotary):
        return self.forward_op(
            self.settings, x, g1, b1, wq, bq, wp, bp, g2, b2, w1, c1, w2, c2, gq, gk, rotary
        )

    def bprop(self, x, g1, b1, wq, bq, wp, bp, g2, b2, w1, c1, w2, c2, gq, gk, rotary, out, dout):
        grads = self.backward_op(
            self.settings, x, g1, b1, wq, bq, wp, bp, g2, b2, w1, c1, w2, c2, gq, gk, rotary, out[1], dout[0]
        )
        return (*grads, ops.zeros_like(rotary))


class EmbeddingOp(nn.Cell):
    """Word plus position rows, with dropout.

    Inputs: input_ids and position_ids [B, S] int32, word weights [V, H], position weights [P, H] (any tensor
    without positions). Output: [S, B, H] float32, the seed of the dropout mask, and the word weights.

    `tied`: the head must take its weights from the third output. Its gradient of them then arrives here and is
    added to in place, where autodiff would hold both tables' gradients and their sum at once.
    """

    def __init__(self, vocab_size, max_positions, hidden_size, dropout, tied):
        super().__init__()
        has_positions = max_positions > 0
        self.tied = tied
        packed = pack((vocab_size, max_positions, hidden_size, has_positions, tied, float(dropout)))
        self.settings = ms.Tensor(packed)
        self.forward_op = _operator(
            "mf_embedding_forward",
            lambda _, ids, at, words, places: ([ids[1], ids[0], hidden_size], [1]),
            lambda _, ids, at, words, places: (words, ms.int64),
        )
        places_shape = [max_positions, hidden_size] if has_positions else [1]
        if tied:
            self.backward_op = _operator("mf_embedding_backward", places_shape, ms.float32)
            self.backward_op.add_prim_attr("side_effect_mem", True)
        else:
            self.backward_op = _operator(
                "mf_embedding_backward",
                lambda _, ids, at, seed, dx: ([vocab_size, hidden_size], places_shape),
                lambda _, ids, at, seed, dx: (dx, dx),
            )

    def construct(self, input_ids, position_ids, words, places):
        output, seed = self.forward_op(self.settings, input_ids, position_ids, words, places)
        return output, seed, words

    def bprop(self, input_ids, position_ids, words, places, out, dout):
        if self.tied:
            dplaces = self.backward_op(self.settings, input_ids, position_ids, out[1], dout[0], dout[2])
            dwords = ops.depend(dout[2], dplaces)
        else:
            dwords, dplaces = self.backward_op(self.settings, input_ids, position_ids, out[1], dout[0])
        return ops.zeros_like(input_ids), ops.zeros_like(position_ids), dwords, dplaces


class NormOp(nn.Cell):
    """LayerNorm or RMSNorm over the last axis. Inputs: x, gamma, beta (any tensor for RMSNorm)."""

    def __init__(self, rms, eps):
        super().__init__()
        self.settings = ms.Tensor(pack((rms, float(eps))))

        def forward_shape(_, x, gamma, beta):
            rows = 1
            for size in x[:-1]:
                rows *= size
            return list(x), [rows, 2]

        self.forward_op = _operator("mf_norm_forward", forward_shape, lambda _, x, gamma, beta: (x, x))
        self.backward_op = _operator(
            "mf_norm_backward",
            lambda _, x, gamma, beta, stats, dy: (list(x), list(gamma), list(beta)),
            lambda _, x, gamma, beta, stats, dy: (x, x, x),
        )

    def construct(self, x, gamma, beta):
        return self.forward_op(self.settings, x, gamma, beta)

    def bprop(self, x, gamma, beta, out, dout):
        return self.backward_op(self.settings, x, gamma, beta, out[1], dout[0])


class LinearOp(nn.Cell):
    """x W^T + bias. Inputs: x [..., in] float32, weight [out, in], bias [out] (any tensor without)."""

    def __init__(self, bf16, has_bias):
        super().__init__()
        self.settings = ms.Tensor(pack((bf16, has_bias)))
        self.forward_op = _operator(
            "mf_linear_forward",
            lambda _, x, weight, bias: [*x[:-1], weight[0]],
            lambda _, x, weight, bias: x,
        )
        self.backward_op = _operator(
            "mf_linear_backward",
            lambda _, x, weight, bias, dy: (list(x), list(weight), list(bias)),
            lambda _, x, weight, bias, dy: (x, x, x),
        )

    def construct(self, x, weight, bias):
        return self.forward_op(self.settings, x, weight, bias)

    def bprop(self, x, weight, bias, out, dout):
        return self.backward_op(self.settings, x, weight, bias, dout)


class HeadLossOp(nn.Cell):
    """LM head and cross-entropy; the logits exist for a chunk of tokens at a time only.

    Inputs: hidden_states [S, B, H] float32, weight [V, H], labels [B*S] int32, loss_mask [B*S] float32.
    Output: loss [1] (mean over the mask, or the sum when not `mean`), count [1] (sum of the mask + 1e-8), and
    the gradients of the loss, which the backward pass scales in place: nothing else may use them.
    """

    def __init__(self, bf16, mean):
        super().__init__()
        self.settings = ms.Tensor(pack((bf16, mean, True)))
        self.forward_op = _operator(
            "mf_head_loss",
            lambda _, x, weight, labels, mask: ([1], [1], list(x), list(weight)),
            lambda _, x, weight, labels, mask: (x, x, x, x),
        )
        self.scale_op = _operator("mf_head_scale", [1], ms.float32)
        self.scale_op.add_prim_attr("side_effect_mem", True)

    def construct(self, hidden_states, weight, labels, loss_mask):
        return self.forward_op(self.settings, hidden_states, weight, labels, loss_mask)

    def bprop(self, hidden_states, weight, labels, loss_mask, out, dout):
        done = self.scale_op(dout[0], out[2], out[3])
        dx = ops.depend(out[2], done)
        dweight = ops.depend(out[3], done)
        return dx, dweight, ops.zeros_like(labels), ops.zeros_like(loss_mask)
