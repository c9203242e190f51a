"""Layers, operators and the roofline: real pieces against the model, formulas against counting, files as written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mindferry.checking import bench, operators, roofline
from tests.support import gpt2_spec


@pytest.fixture(scope="module", params=["portable", "fused"])
def heard(request, tiny):
    """(calls of the parts in the model, their compiled pieces) of the tiny run, dropout off."""
    import mindspore as ms

    from mindferry.checking import layer_times, sides
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    run = RunDirectory(tiny / "run")
    layers = {"model.model_config.layer_spec": request.param}
    content = engine.prepare(run, engine.Options(overrides={**sides.no_dropout(), **layers}))
    network = sides.build_network(content, engine.set_up(content, run))
    sides.load_weights(network, Path(content["load_checkpoint"]))
    network.set_train(True)
    inputs = tuple(ms.Tensor(v) for v in vars(sides.first_batch(content, 2)).values())
    calls = layer_times.calls_of(network, inputs, content["context"]["mode"])
    whole = network(**dict(zip(("input_ids", "labels", "loss_mask", "position_ids"), inputs, strict=True)))[0]
    return calls, {name: layer_times.piece(call) for name, call in calls.items()}, float(whole.asnumpy())


def test_compiled_pieces_compute_what_the_model_does(heard):
    calls, pieces, whole = heard
    names = list(calls)
    assert names[:4] == ["embedding", "decoder.layers.0", "decoder.layers.1", "decoder.final_layernorm"]
    assert names[4] == "head"
    for name, call in calls.items():
        expected = call.output[0] if isinstance(call.output, tuple) else call.output
        np.testing.assert_allclose(pieces[name][0](), expected.asnumpy(), rtol=1e-4, atol=1e-5)
    # One goes into the next, and the last of them is the model's loss.
    hidden = calls["decoder.layers.0"].output[0].asnumpy()
    np.testing.assert_array_equal(calls["decoder.layers.1"].arguments[0].asnumpy(), hidden)
    assert float(np.reshape(pieces[names[-1]][0](), -1)[0]) == pytest.approx(whole, rel=1e-5)


def test_backward_is_a_real_gradient(heard):
    """The last result is the gradient of the last parameter of a layer: compared with a finite difference."""
    calls, pieces, _ = heard
    forward, both = pieces["decoder.layers.1"]
    bias = calls["decoder.layers.1"].cell.mlp.linear_fc2.bias
    gradient = np.reshape(both(), -1)
    # The output is the residual plus this bias, so every element gets one from each of the B x S tokens.
    tokens = np.prod(forward().shape[:2])
    assert gradient.shape == tuple(bias.shape)
    np.testing.assert_allclose(gradient, np.full(bias.shape, tokens), rtol=1e-5)


def test_work_of_a_layer_against_counting_each_product():
    spec = gpt2_spec(hidden_size=16, kv_channels=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
                     gated_linear_unit=True, activation="silu")  # fmt: skip
    batch, seq = 3, 5
    flops = moved = 0

    def product(a, b):
        nonlocal flops, moved
        (m, k), n = a, b[1]
        flops += 2 * m * k * n
        moved += 4 * (m * k + k * n + m * n)

    tokens = batch * seq
    product((tokens, 16), (16, 4 * 8))  # queries
    moved -= 2 * 4 * tokens * 16  # queries, keys and values are one product of the same input
    product((tokens, 16), (16, 2 * 8))
    product((tokens, 16), (16, 2 * 8))
    product((tokens, 32), (32, 16))
    product((tokens, 16), (16, 128))
    product((tokens, 64), (64, 16))
    linear = moved
    for _ in range(batch * 4):
        product((seq, 8), (8, seq))
        product((seq, seq), (seq, 8))
    found = roofline.layer_work(spec, batch, seq, 4, fused_attention=False)
    assert (found.flops, found.bytes) == (flops, moved)
    fused = roofline.layer_work(spec, batch, seq, 4, fused_attention=True)
    # Queries and the result of 4 heads, keys and values of 2 groups, each once.
    assert (fused.flops, fused.bytes) == (flops, linear + 4 * tokens * 8 * (4 + 4 + 2 + 2))
    assert roofline.head_work(spec, batch, seq, 2).flops == 2 * tokens * 16 * spec.vocab_size


def test_place_on_the_roofline():
    work = roofline.Work(flops=1e9, bytes=1e8)
    at = roofline.place(work, forward=0.1, both=0.5, peak=1e12, bandwidth=1e10)
    # 10 FLOP a byte x 10 GB/s = 0.1 TFLOP/s, below the peak; 3 GFLOP in half a second are 6 GFLOP/s.
    assert (at["intensity"], at["bound"], at["roof_flops_per_second"]) == (10, "memory", 1e11)
    assert at["achieved_flops_per_second"] == pytest.approx(6e9)
    assert at["share_of_roof"] == pytest.approx(0.06)
    assert at["forward_share_of_roof"] == pytest.approx(0.1)
    assert roofline.place(work, 0.1, 0.5, 1e10, 1e10)["bound"] == "compute"


def test_rows_and_their_sum():
    series = {"embedding/forward": [1.0] * 6, "embedding/both": [2.0] * 6, "whole/forward": [7.0] * 6,
              "whole/both": [17.0] * 6}  # fmt: skip
    for i, seconds in ((0, 2.0), (3, 4.0)):
        series |= {
            f"decoder.layers.{i}/forward": [seconds] * 6,
            f"decoder.layers.{i}/both": [3 * seconds] * 6,
        }
    side = bench.Side("run", series)
    content = {"model": {"model_config": {"compute_dtype": "float32", "seq_length": 8, "layer_spec": "portable"}},
               "runner_config": {"batch_size": 2}}  # fmt: skip
    rows = roofline.layer_rows(side, gpt2_spec(), content, (1e9, 1e9))
    assert [row["name"] for row in rows] == ["embedding", "decoder.layers.0", "decoder.layers.3"]
    assert rows[1]["backward_seconds"] == 4.0
    assert "roofline" in rows[1]
    assert "roofline" not in rows[0]
    # Four layers of 3 s (the mean) and the embedding's 1 s, against 7 s.
    assert roofline.check_sum(side, rows, 4) == {
        "forward": pytest.approx(13 / 7),
        "both": pytest.approx(38 / 17),
    }


LINES = """\
Default/network-X/model-GPTModel/decoder-TransformerBlock/layers-CellList/1-TransformerLayer/mlp-M/MatMul-op3;\
HostCpuOps;1000000000,2.0,0 3000000000,4.0,0
Gradients/Default/network-X/model-GPTModel/decoder-TransformerBlock/layers-CellList/1-TransformerLayer/Mul-op0;\
HostCpuOps;1001000000,3.0,0
Expand/_SumExt/ReduceSum-op7;HostCpuOps;5000000000,1.0,0 broken
Default/optimizer-AdamW/Mul-op9;HostCpuOps;6000000000,0.5,0
"""


def test_a_file_of_the_profiler(tmp_path):
    path = tmp_path / "cpu_op_execute_timestamp_0.txt"
    path.write_text(LINES)
    seen = operators.read(path)
    assert [(o.kind, o.place) for o in seen] == [
        ("MatMul", "decoder.layers.1"), ("Mul", "decoder.layers.1"), ("MatMul", "decoder.layers.1"),
        ("ReduceSum", "no place: expanded or fused by MindSpore"), ("Mul", "optimizer"),
    ]  # fmt: skip
    # The first two overlap by a millisecond: 1.000 to 1.004, then 4, 1 and half a millisecond.
    assert operators.busy(seen) == pytest.approx(9.5e-3)
    found = operators.table(seen, steps=2, step_seconds=0.01)
    assert found["by_type"][0] == {
        "name": "MatMul",
        "count": 1.0,
        "seconds": pytest.approx(3e-3),
        "share": 0.3,
    }
    assert found["between_seconds"] == pytest.approx(0.01 - 4.75e-3)
    assert sum(row["seconds"] for row in found["by_place"]) == pytest.approx(5.25e-3)
    # PyNative: names without a path tell no place.
    path.write_text("MatMul;HostCpuOps;1000000000,2.0,0\n")
    assert operators.table(operators.read(path), 1, 0.01)["by_place"] == []


@pytest.mark.long
def test_pynative_has_operators_and_layers_too(tiny, tmp_path):
    from mindferry.targets.run_directory import RunDirectory

    task = bench.run_task(RunDirectory(tiny / "run"), 6, tmp_path / "log", dict(bench.STOCK), True, True)
    side = bench.measure({"run": task}, 6, tmp_path)["run"]
    assert side.failure == "", (tmp_path / "log").read_text()[-2000:]
    assert side.operators["by_type"]
    assert side.operators["by_place"] == []
    assert len(side.times("decoder.layers.0/forward")) == 6
    assert json.dumps(side.operators)
