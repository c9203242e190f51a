"""Dropout by step: fair, fresh at every step, and the same again for the same step."""

from __future__ import annotations

import numpy as np
import pytest

from mindferry.layers.dropout import PortableDropout, count_steps

P = 0.1


@pytest.fixture(scope="module")
def drawn() -> tuple:
    """The function step -> mask (0 or 1) of one layer, [64, 48, 100], in graph mode, and a second layer's."""
    import mindspore as ms
    from mindspore import nn

    ms.set_context(mode=ms.GRAPH_MODE)

    class Two(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first, self.second = PortableDropout(P), PortableDropout(P)

        def construct(self, x):
            return self.first(x), self.second(x)

    network = Two()
    counter = count_steps(network, seed=42)
    network.set_train()
    ones = ms.Tensor(np.ones((64, 48, 100), np.float32))

    def masks(step: int) -> list[np.ndarray]:
        counter.set_data(ms.Tensor([step], ms.int32))
        return [out.asnumpy() for out in network(ones)]

    return masks, network


def test_values_and_share_of_kept(drawn: tuple) -> None:
    masks, _ = drawn
    first, second = masks(3)
    for mask in (first, second):
        assert set(np.unique(mask)) == {np.float32(0.0), np.float32(1.0 / (1.0 - P))}
        kept = (mask > 0).mean()
        assert abs(kept - (1 - P)) < 5 * np.sqrt(P * (1 - P) / mask.size)


def test_every_row_and_column_is_fair(drawn: tuple) -> None:
    """Shares of the 3072 rows and of the 100 columns spread as binomials do, no more and no less."""
    masks, _ = drawn
    kept = (masks(7)[0] > 0).reshape(-1, 100)
    for axis, count in ((1, 100), (0, 3072)):
        spread = kept.mean(axis=axis).std() / np.sqrt(P * (1 - P) / count)
        assert 0.7 < spread < 1.3


def test_no_correlation(drawn: tuple) -> None:
    """Between neighbours, rows, steps and layers: within 5 standard deviations of none."""
    masks, _ = drawn
    first, second = ((mask > 0).astype(np.float64).reshape(-1, 100) for mask in masks(11))
    later = (masks(12)[0] > 0).astype(np.float64).reshape(-1, 100)

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])

    pairs = {
        "columns": (first[:, :-1], first[:, 1:]),
        "rows": (first[:-1], first[1:]),
        "far rows": (first[:1536], first[1536:]),
        "diagonal": (first[:-1, :-1], first[1:, 1:]),
        "steps": (first, later),
        "layers": (first, second),
    }
    for name, (a, b) in pairs.items():
        assert abs(correlation(a, b)) < 5 / np.sqrt(a.size), name


def test_the_same_step_draws_the_same(drawn: tuple) -> None:
    masks, _ = drawn
    before = masks(5)
    masks(6)
    again = masks(5)
    np.testing.assert_array_equal(before[0], again[0])
    assert not np.array_equal(before[0], masks(6)[0])


def test_the_gradient_is_the_mask_and_evaluation_is_identity(drawn: tuple) -> None:
    import mindspore as ms
    from mindspore import ops

    masks, network = drawn
    mask = masks(9)[0]
    x = ms.Tensor(np.ones((64, 48, 100), np.float32))

    def total(value):
        return ops.ReduceSum()(network.first(value))

    gradient = ms.grad(total)(x)
    np.testing.assert_array_equal(gradient.asnumpy(), mask)
    network.set_train(False)
    np.testing.assert_array_equal(network.first(x).asnumpy(), x.asnumpy())
    network.set_train()
