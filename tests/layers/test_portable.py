"""Portable layers against PyTorch and closed forms, in both modes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

ms = pytest.importorskip("mindspore")
from mindspore import ops  # noqa: E402

from mindferry.layers.portable import CoreAttention, CrossEntropy, PortableDropout, SplitLast  # noqa: E402

MODES = {"graph": 0, "pynative": 1}


@pytest.fixture(params=sorted(MODES))
def mode(request: pytest.FixtureRequest) -> str:
    ms.set_context(mode=MODES[request.param], device_target="CPU")
    return request.param


def config(heads: int, groups: int, head_dim: int, dropout: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=head_dim,
        softmax_compute_dtype=ms.float32,
        attention_dropout=dropout,
    )


class Weighted(ms.nn.Cell):
    """Scalar of an attention, so that a gradient can be taken."""

    def __init__(self, cell, weight):
        super().__init__()
        self.cell, self.weight = cell, weight

    def construct(self, query, key, value, mask):
        return (self.cell(query, key, value, mask) * self.weight).sum()


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
def test_attention_and_its_gradient_match_torch(mode: str, heads: int, groups: int) -> None:
    seq_length, batch, head_dim = 13, 3, 8
    rng = np.random.default_rng(heads * 10 + groups)
    query = rng.standard_normal((seq_length, batch, heads, head_dim)).astype(np.float32)
    key, value = rng.standard_normal((2, seq_length, batch, groups, head_dim)).astype(np.float32)
    weight = rng.standard_normal((seq_length, batch, heads * head_dim)).astype(np.float32)
    mask = np.broadcast_to(
        np.triu(np.ones((seq_length, seq_length), np.float32), 1), (batch, 1, seq_length, seq_length)
    )

    net = Weighted(CoreAttention(config(heads, groups, head_dim)), ms.Tensor(weight))
    total, grads = ops.value_and_grad(net, (0, 1, 2))(
        *(ms.Tensor(np.ascontiguousarray(x)) for x in (query, key, value, mask))
    )

    tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (query, key, value)]
    heads_first = [t.permute(1, 2, 0, 3) for t in tensors]
    spread = [heads_first[0], *(t.repeat_interleave(heads // groups, dim=1) for t in heads_first[1:])]
    expected = torch.nn.functional.scaled_dot_product_attention(*spread, is_causal=True)
    scalar = (expected.permute(2, 0, 1, 3).reshape(seq_length, batch, -1) * torch.tensor(weight)).sum()
    scalar.backward()
    assert float(total) == pytest.approx(scalar.item(), rel=1e-5, abs=1e-4)
    for ours, theirs in zip(grads, tensors, strict=True):
        np.testing.assert_allclose(ours.asnumpy(), theirs.grad.numpy(), rtol=1e-4, atol=1e-5)


class SplitThenTranspose(ms.nn.Cell):
    def __init__(self, split, weights):
        super().__init__()
        self.split, self.weights = split, weights

    def construct(self, x):
        total = 0.0
        for part, weight in zip(self.split(x, (3, 2), 2), self.weights):  # noqa: B905 - graph mode has no strict
            total = total + (ops.transpose(part, (1, 0, 2)) * weight).sum()
        return total


def test_split_gradient_survives_a_transpose(mode: str) -> None:
    """The fault that SplitLast is there for: SplitWithSize gets this wrong in PyNative on a CPU."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    weights = [rng.standard_normal((3, 4, n)).astype(np.float32) for n in (3, 2)]
    net = SplitThenTranspose(SplitLast(), [ms.Tensor(w) for w in weights])
    gradient = ops.grad(net)(ms.Tensor(x)).asnumpy()
    expected = np.concatenate([w.transpose(1, 0, 2) for w in weights], axis=-1)
    np.testing.assert_array_equal(gradient, expected)


def test_cross_entropy_and_its_gradient_match_torch(mode: str) -> None:
    """Masked and ignored (-100) labels count for nothing."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((7, 11)) * 30).astype(np.float32)
    labels = np.array([0, 10, 3, -100, 5, 5, 9], np.int32)
    mask = np.array([1, 1, 0, 0, 1, 1, 1], np.float32)
    loss, gradient = ops.value_and_grad(CrossEntropy(per_token_loss=False))(
        ms.Tensor(logits), ms.Tensor(labels), ms.Tensor(mask)
    )
    x = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    target = torch.tensor(np.where(mask > 0, labels, -100).astype(np.int64))
    expected = torch.nn.functional.cross_entropy(x, target, ignore_index=-100)
    expected.backward()
    assert float(loss[0]) == pytest.approx(expected.item(), rel=1e-6)
    np.testing.assert_allclose(gradient.asnumpy(), x.grad.numpy(), atol=3e-6)


def test_per_token_loss_gives_sum_and_count(mode: str) -> None:
    logits = np.zeros((4, 5), np.float32)
    total, count = CrossEntropy(per_token_loss=True)(
        ms.Tensor(logits), ms.Tensor(np.zeros(4, np.int32)), ms.Tensor(np.array([1, 1, 1, 0], np.float32))
    )
    assert float(total[0]) == pytest.approx(3 * np.log(5), rel=3e-7)
    assert float(count[0]) == pytest.approx(3.0)


def test_dropout_drops_in_training_and_only_there(mode: str) -> None:
    cell = PortableDropout(0.25)
    x = ms.Tensor(np.ones((200, 200), np.float32))
    cell.set_train(False)
    np.testing.assert_array_equal(cell(x).asnumpy(), x.asnumpy())
    cell.set_train(True)
    out = cell(x).asnumpy()
    assert set(np.unique(out)) == {np.float32(0.0), np.float32(1 / 0.75)}
    assert np.mean(out == 0.0) == pytest.approx(0.25, abs=0.01)
    assert not np.array_equal(out, cell(x).asnumpy()), "every call draws a new mask"
