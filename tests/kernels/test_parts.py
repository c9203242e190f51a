"""Embedding, norm, linear, head with cross-entropy, AdamW: against PyTorch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mindferry.errors import MindferryError
from mindferry.kernels import has_bf16
from mindferry.kernels.library import pack

from .reference import distance

RNG = np.random.default_rng(0)
BF16 = pytest.param(
    True, marks=pytest.mark.skipif(not has_bf16(), reason="this CPU has no bfloat16 products")
)


def floats(*shape, scale=1.0):
    return (scale * RNG.normal(0, 1, shape)).astype(np.float32)


def double(array):
    return torch.tensor(array, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("vocab", [101, 50257, 50304])
@pytest.mark.parametrize("half", [False, BF16])
@pytest.mark.parametrize("mean", [True, False])
def test_head_loss(lib, vocab, half, mean):
    seq, batch, hidden = 7, 3, 24
    x, w = floats(seq, batch, hidden), floats(vocab, hidden)
    labels = RNG.integers(0, vocab, batch * seq).astype(np.int32)
    mask = (RNG.random(batch * seq) < 0.8).astype(np.float32)
    labels[0], mask[0] = -100, 0.0
    loss, count = np.empty(1, np.float32), np.empty(1, np.float32)
    dx, dw = np.empty_like(x), np.empty_like(w)
    lib.call("mf_head_loss", [pack((half, mean, True)), x, w, labels, mask], [loss, count, dx, dw])
    tx, tw, tm = double(x), double(w), torch.tensor(mask, dtype=torch.float64)
    logits = (tx @ tw.T).transpose(0, 1).reshape(-1, vocab)
    each = F.cross_entropy(logits, torch.tensor(labels.clip(0)).long(), reduction="none")
    total = (each * tm).sum()
    expected = total / tm.sum() if mean else total
    expected.backward()
    tolerance = 1e-2 if half else 1e-5
    assert abs(loss[0] - expected.item()) < tolerance * abs(expected.item())
    assert count[0] == mask.sum()
    assert distance(dx, tx.grad.numpy()) < tolerance
    assert distance(dw, tw.grad.numpy()) < tolerance


def test_head_loss_in_several_chunks_and_with_large_logits(lib):
    # 2000 tokens x 20000 words are two chunks of logits.
    x, w = floats(1000, 2, 8, scale=30.0), floats(20000, 8)
    labels, mask = RNG.integers(0, 20000, 2000).astype(np.int32), np.ones(2000, np.float32)
    loss, count, dx, dw = np.empty(1, np.float32), np.empty(1, np.float32), np.empty_like(x), np.empty_like(w)
    lib.call("mf_head_loss", [pack((False, True, True)), x, w, labels, mask], [loss, count, dx, dw])
    tx, tw = torch.tensor(x, requires_grad=True), torch.tensor(w, requires_grad=True)
    logits = (tx @ tw.T).transpose(0, 1).reshape(2000, -1)
    expected = F.cross_entropy(logits, torch.tensor(labels).long())
    expected.backward()
    assert abs(loss[0] - expected.item()) < 1e-4 * expected.item()
    assert distance(dx, tx.grad.numpy()) < 1e-4
    assert distance(dw, tw.grad.numpy()) < 1e-4


def test_head_refuses_a_label_outside_the_vocabulary(lib):
    x, w = floats(4, 2, 8), floats(10, 8)
    labels, mask = np.zeros(8, np.int32), np.ones(8, np.float32)
    out = [np.empty(1, np.float32), np.empty(1, np.float32), np.empty_like(x), np.empty_like(w)]
    labels[6] = 10
    with pytest.raises(MindferryError, match=r"label 10 at \[1, 2\] is outside \[0, 10\)"):
        lib.call("mf_head_loss", [pack((False, True, True)), x, w, labels, mask], out)
    labels[6] = -1
    with pytest.raises(MindferryError, match=r"label -1 at \[1, 2\]"):
        lib.call("mf_head_loss", [pack((False, True, True)), x, w, labels, mask], out)


def embed(lib, ids, places, words, positions, dropout=0.0, dy=None, tied=None):
    settings = pack((len(words), len(positions), words.shape[1], True, tied is not None, dropout))
    y, seed = np.empty((*ids.T.shape, words.shape[1]), np.float32), np.empty(1, np.int64)
    lib.call("mf_embedding_forward", [settings, ids, places, words, positions], [y, seed])
    if dy is None:
        return y, None, None
    dwords, dpositions = np.full_like(words, np.nan), np.full_like(positions, np.nan)
    if tied is not None:
        lib.call("mf_embedding_backward", [settings, ids, places, seed, dy, tied], [dpositions])
        return y, tied, dpositions
    lib.call("mf_embedding_backward", [settings, ids, places, seed, dy], [dwords, dpositions])
    return y, dwords, dpositions


def test_embedding(lib):
    words, positions = floats(50, 33), floats(20, 33)
    ids = RNG.integers(0, 50, (3, 17)).astype(np.int32)
    ids[:, 3:6] = 7  # the same word many times
    at = np.tile(np.arange(17, dtype=np.int32), (3, 1))
    dy = floats(17, 3, 33)
    y, dwords, dpositions = embed(lib, ids, at, words, positions, dy=dy)
    tw, tp = double(words), double(positions)
    expected = (
        F.embedding(torch.tensor(ids).long(), tw) + F.embedding(torch.tensor(at).long(), tp)
    ).transpose(0, 1)
    expected.backward(torch.tensor(dy, dtype=torch.float64))
    assert distance(y, expected.detach().numpy()) < 1e-6
    assert distance(dwords, tw.grad.numpy()) < 1e-6
    assert distance(dpositions, tp.grad.numpy()) < 1e-6
    head = floats(50, 33)
    _, summed, same = embed(lib, ids, at, words, positions, dy=dy, tied=head.copy())
    assert distance(summed, head + tw.grad.numpy()) < 1e-6
    assert np.array_equal(same, dpositions)


def test_embedding_dropout_gradient_has_the_same_mask(lib):
    words, positions = np.ones((5, 64), np.float32), np.zeros((9, 64), np.float32)
    ids, at = np.arange(5, dtype=np.int32).reshape(1, 5), np.arange(5, dtype=np.int32).reshape(1, 5)
    y, dwords, _ = embed(lib, ids, at, words, positions, 0.5, np.ones((5, 1, 64), np.float32))
    assert set(np.unique(y)) == {0.0, 2.0}
    assert np.array_equal(dwords, y[:, 0])


@pytest.mark.parametrize(("bad", "shown"), [(50, "50"), (-1, "-1"), (2**31 - 1, "2147483647")])
def test_embedding_refuses_ids_outside_the_table(lib, bad, shown):
    words, positions = floats(50, 8), floats(20, 8)
    ids, at = np.zeros((2, 6), np.int32), np.zeros((2, 6), np.int32)
    ids[1, 4] = bad
    with pytest.raises(MindferryError, match=rf"token id {shown} at \[1, 4\] is outside \[0, 50\)"):
        embed(lib, ids, at, words, positions)
    ids[1, 4], at[0, 2] = 0, 20
    with pytest.raises(MindferryError, match=r"position id 20 at \[0, 2\] is outside \[0, 20\)"):
        embed(lib, ids, at, words, positions)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_norm(lib, rms, offset):
    x, gamma, beta, dy = floats(5, 3, 77) + np.float32(offset), floats(77), floats(77), floats(5, 3, 77)
    settings, y, stats = pack((rms, 1e-5)), np.empty_like(x), np.empty((15, 2), np.float32)
    lib.call("mf_norm_forward", [settings, x, gamma, beta], [y, stats])
    grads = [np.empty_like(a) for a in (x, gamma, beta)]
    lib.call("mf_norm_backward", [settings, x, gamma, beta, stats, dy], grads)
    tx, tg, tb = double(x), double(gamma), double(beta)
    out = F.rms_norm(tx, (77,), tg, 1e-5) if rms else F.layer_norm(tx, (77,), tg, tb, 1e-5)
    out.backward(torch.tensor(dy, dtype=torch.float64))
    tolerance = 1e-5 if offset == 0.0 else 2e-3  # x itself has 24 bits: 1000 leaves 6e-5 of every element
    assert distance(y, out.detach().numpy()) < tolerance
    assert distance(grads[0], tx.grad.numpy()) < tolerance * 10
    assert distance(grads[1], tg.grad.numpy()) < tolerance
    if not rms:
        assert distance(grads[2], tb.grad.numpy()) < 1e-5


@pytest.mark.parametrize("half", [False, BF16])
@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 1, 1), (7, 33, 65), (130, 128, 50)])
def test_linear(lib, half, rows, inner, outer):
    x, w, b, dy = floats(rows, inner), floats(outer, inner), floats(outer), floats(rows, outer)
    y, grads = np.empty_like(dy), [np.empty_like(a) for a in (x, w, b)]
    lib.call("mf_linear_forward", [pack((half, True)), x, w, b], [y])
    lib.call("mf_linear_backward", [pack((half, True)), x, w, b, dy], grads)
    tx, tw, tb = double(x), double(w), double(b)
    out = F.linear(tx, tw, tb)
    out.backward(torch.tensor(dy, dtype=torch.float64))
    tolerance = 1e-2 if half else 1e-5
    # Rounding is relative to the terms: a sum of one product and a bias may cancel.
    terms = np.abs(x) @ np.abs(w).T + np.abs(b)
    assert np.linalg.norm(y - out.detach().numpy()) / np.linalg.norm(terms) < tolerance
    for found, leaf in zip(grads, (tx, tw, tb), strict=True):
        assert distance(found, leaf.grad.numpy()) < tolerance


def test_adamw_follows_pytorch(lib):
    p = floats(1000)
    m, v = np.zeros_like(p), np.zeros_like(p)
    tp = torch.nn.Parameter(torch.tensor(p, dtype=torch.float64))
    optimizer = torch.optim.AdamW([tp], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 8):
        g = floats(1000)
        shared = np.array([0.9, 0.95, 1e-8, 1 - 0.9**step, 1 - 0.95**step, 0.5], np.float32)
        rates, decays = np.array([3e-3], np.float32), np.array([0.1], np.float32)
        lib.call("mf_adamw", [shared, rates, decays, p, m, v, g], [np.empty(1, np.float32)])
        tp.grad = torch.tensor(g * np.float32(0.5), dtype=torch.float64)
        optimizer.step()
    assert np.abs(p - tp.detach().numpy()).max() < 1e-5


def test_squares(lib):
    gradients, out = [floats(3), floats(300, 700), floats(1)], np.empty(1, np.float32)
    lib.call("mf_squares", gradients, [out])
    expected = sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients)
    assert abs(out[0] - expected) < 1e-6 * expected
    gradients[1][2, 2] = np.inf
    lib.call("mf_squares", gradients, [out])
    assert not np.isfinite(out[0])
