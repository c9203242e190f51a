"""The parts of a layer against PyTorch's autograd, on one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mindferry.rehearsal import cells
from mindferry.rehearsal.cells import Share
from mindferry.rehearsal.wire import Wire

ALONE = {"world": (0,), "tensor": (0,), "data": (0,)}
rng = np.random.default_rng(5)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x.astype(np.float64), requires_grad=True)


def close(ours: np.ndarray, theirs: torch.Tensor | None) -> None:
    assert theirs is not None
    expected = theirs.detach().numpy()
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-6 * max(np.abs(expected).max(), 1.0))


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norms(kind: str) -> None:
    x, scale, shift, dy = draw(3, 2, 8), draw(8), draw(8), draw(3, 2, 8)
    names = {"n.gamma": scale, "n.beta": shift} if kind == "LayerNorm" else {"n.weight": scale}
    share = Share(names)
    norm = cells.Norm(share, "n", 1e-5)
    y, saved = norm.forward(x)
    tx, ts, tb = tensor(x), tensor(scale), tensor(shift)
    if kind == "LayerNorm":
        ty = torch.nn.functional.layer_norm(tx, (8,), ts, tb, 1e-5)
    else:
        ty = torch.nn.functional.rms_norm(tx, (8,), ts, 1e-5)
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    close(y, ty)
    close(norm.backward(dy, saved), tx.grad)
    close(share.gradients["n.gamma" if kind == "LayerNorm" else "n.weight"], ts.grad)
    if kind == "LayerNorm":
        close(share.gradients["n.beta"], tb.grad)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("gelu_erf", torch.nn.functional.gelu),
        ("silu", torch.nn.functional.silu),
        ("relu", torch.relu),
    ],
)
def test_activations(name: str, theirs) -> None:
    x = draw(50) * 3
    value, slope = cells.ACTIVATIONS[name](x)
    tx = tensor(x)
    ty = theirs(tx)
    ty.sum().backward()
    close(value, ty)
    close(slope, tx.grad)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_attention(groups: int) -> None:
    """[S, B, N, D] with grouped key/value heads, causal."""
    q, k, v, dy = draw(6, 2, 4, 8), draw(6, 2, groups, 8), draw(6, 2, groups, 8), draw(6, 2, 32)
    core = cells.CoreAttention()
    y, saved = core.forward(q, k, v)
    tq, tk, tv = tensor(q), tensor(k), tensor(v)
    heads = [x.permute(1, 2, 0, 3) for x in (tq, tk, tv)]
    ty = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    ty = ty.permute(2, 0, 1, 3).reshape(6, 2, 32)
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    close(y, ty)
    for ours, theirs in zip(core.backward(dy, saved), (tq, tk, tv), strict=True):
        close(ours, theirs.grad)


def test_rotary_backward_is_the_transpose() -> None:
    """<R x, y> = <x, R^T y> for any x and y, with a part of the head not rotated."""
    angles = rng.random((5, 3))
    rotary = cells.Rotary(*(np.concatenate([f(angles)] * 2, 1).astype(np.float32) for f in (np.cos, np.sin)))
    x, y = draw(5, 2, 3, 8), draw(5, 2, 3, 8)
    assert (rotary.forward(x) * y).sum() == pytest.approx((x * rotary.backward(y)).sum(), rel=1e-4)


def test_loss() -> None:
    logits, labels, weights = draw(7, 11) * 4, rng.integers(0, 11, 7), np.abs(draw(7))
    loss = cells.VocabLoss(Wire(0, ALONE, []))
    losses, saved = loss.forward(logits, labels)
    tl = tensor(logits)
    theirs = torch.nn.functional.cross_entropy(tl, torch.from_numpy(labels), reduction="none")
    (theirs * torch.from_numpy(weights)).sum().backward()
    close(losses, theirs)
    close(loss.backward(weights, saved), tl.grad)


def test_table_adds_up_rows_that_come_twice() -> None:
    table = draw(9, 4)
    ids = np.array([[1, 1, 3], [3, 0, 1]])
    share = Share({"t": table})
    cell = cells.VocabTable(share, "t", Wire(0, ALONE, []), sequence=False)
    y, saved = cell.forward(ids)
    dy = draw(3, 2, 4)
    cell.backward(dy, saved)
    tt = tensor(table)
    ty = torch.nn.functional.embedding(torch.from_numpy(ids.T.copy()), tt)
    ty.backward(torch.tensor(dy, dtype=torch.float64))
    close(y, ty)
    close(share.gradients["t"], tt.grad)
