"""One GPT-2 layer, forward and backward: mindferry against stock MindSpore and PyTorch.

python -m benchmarks.layer [--shape B4_S256_H768 ...] [--dtype bf16 fp32] [--rounds 15] [--scaling] [--recompute]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks.interleave import measure, serve, write_results

SHAPES = ("B4_S256_H768", "B1_S1024_H768", "B2_S512_H1024")
SIDES = ("mindferry", "stock_graph", "torch_eager", "torch_compile", "gemm_floor")


def sizes(shape: str) -> tuple[int, int, int]:
    """Batch, sequence length and hidden size of a name such as B4_S256_H768."""
    match = re.fullmatch(r"B(\d+)_S(\d+)_H(\d+)", shape)
    if match is None:
        raise SystemExit(f"--shape: found {shape!r}, expected something like B4_S256_H768")
    return int(match[1]), int(match[2]), int(match[3])


def mindspore_side(shape: str, dtype: str, layer_spec: str, recompute: str = "") -> None:
    import numpy as np

    from benchmarks.interleave import quiet_mindspore

    quiet_mindspore()
    import mindspore as ms
    from mindformers.parallel_core.training_graph.device_matrix import layout
    from mindformers.parallel_core.utils.spec_utils import build_module
    from mindspore import nn, ops

    from mindferry.layers.fused import fused_layer_spec
    from mindferry.layers.portable import portable_layer_spec
    from mindferry.training.models import GPT2Config

    batch, seq, hidden = sizes(shape)
    config = GPT2Config(
        hidden_size=hidden,
        num_heads=hidden // 64,
        num_layers=1,
        ffn_hidden_size=4 * hidden,
        seq_length=seq,
        embedding_dropout=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        compute_dtype="bfloat16" if dtype == "bf16" and layer_spec == "fused" else "float32",
        layer_spec=layer_spec,
    ).convert_to_transformer_config()
    layout.init_layout(config)
    make = fused_layer_spec if layer_spec == "fused" else portable_layer_spec
    layer = build_module(make(config, "gelu_tanh").layer_specs[0], config=config, layer_number=0)
    for part in recompute.split("+") if recompute else ():
        {"all": layer, "attention": layer.self_attention, "mlp": layer.mlp}[part].recompute()

    from mindspore.ops.auto_generate import SplitWithSize
    from mindspore.ops.operations import Morph

    from mindferry.layers.portable import _MORPHS, PortableDropout, SplitLast

    if layer_spec != "fused":
        for _, cell in layer.cells_and_names():
            for morph, method in _MORPHS.items():
                if isinstance(getattr(cell, morph, None), Morph):
                    setattr(cell, morph, getattr(cell, method))
            for name, value in list(vars(cell).items()):
                if isinstance(value, SplitWithSize):
                    setattr(cell, name, SplitLast())
        layer.hidden_states_dropout = PortableDropout(0.0)

    class Step(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layer = layer
            self.weights = ms.ParameterTuple(layer.trainable_params())
            self.grad = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
            self.mask = ms.Tensor(1 - np.tri(seq, dtype=np.float32)[None, None])
            self.run = Output(self.layer, self.mask)

        def construct(self, x, dy):
            return self.grad(self.run, self.weights)(x, dy)

    class Output(nn.Cell):
        def __init__(self, layer, mask):
            super().__init__()
            self.layer, self.mask = layer, mask

        def construct(self, x):
            return self.layer(x, self.mask)[0]

    step = Step()
    step.set_train(True)
    rng = np.random.default_rng(0)
    x, dy = (ms.Tensor(rng.normal(0, 1, (seq, batch, hidden)).astype(np.float32)) for _ in range(2))

    def once() -> None:
        grads = step(x, dy)
        grads[0][0].asnumpy()
        grads[1][0].asnumpy()

    serve(once, warm_up=3)


def torch_side(shape: str, dtype: str, compiled: bool) -> None:
    import os

    import torch
    import torch.nn.functional as F

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    batch, seq, hidden = sizes(shape)
    heads = hidden // 64

    class Block(torch.nn.Module):
        """nanoGPT's block: pre-norm, causal SDPA, tanh GELU."""

        def __init__(self):
            super().__init__()
            self.n1, self.n2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
            self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
            self.fc1, self.fc2 = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            q, k, v = self.qkv(self.n1(x)).split(hidden, 2)
            q, k, v = (t.view(batch, seq, heads, 64).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, hidden))
            return x + self.fc2(F.gelu(self.fc1(self.n2(x)), approximate="tanh"))

    block = Block()
    run = torch.compile(block) if compiled else block
    x = torch.randn(batch, seq, hidden, requires_grad=True)
    dy = torch.randn(batch, seq, hidden)

    def once() -> None:
        for p in (x, *block.parameters()):
            p.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            y = run(x)
        y.backward(dy.to(y.dtype))

    serve(once, warm_up=3)


def floor_side(shape: str, dtype: str) -> None:
    """The twelve products of the four linears, by oneDNN alone, in the orientations in which the layer has them."""
    from mindferry import kernels

    library = kernels.load()
    batch, seq, hidden = sizes(shape)
    rows, half = batch * seq, dtype == "bf16"
    linears = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]

    def once() -> float:
        total = 0.0
        for inner, outer in linears:
            total += library.product_seconds(rows, outer, inner, half, 2)
            total += library.product_seconds(rows, inner, outer, half, 0)
            total += library.product_seconds(outer, inner, rows, half, 1)
        return total

    serve(once, warm_up=3)


def worker(side: str, shape: str, dtype: str) -> None:
    if side.startswith("mindferry"):
        mindspore_side(shape, dtype, "fused", side.partition(":")[2])
    elif side == "stock_graph":
        mindspore_side(shape, dtype, "portable")
    elif side == "gemm_floor":
        floor_side(shape, dtype)
    else:
        torch_side(shape, dtype, side == "torch_compile")


def command(side: str, shape: str, dtype: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.layer", "--worker", side, "--shape", shape, "--dtype", dtype]


def note(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def compare(shape: str, dtype: str, rounds: int) -> dict:
    """One table of times, its ratios printed."""
    sides = measure({side: command(side, shape, dtype) for side in SIDES}, rounds, note)
    ours, name = sides["mindferry"], f"layer.{shape}.{dtype}"
    for side in ("stock_graph", "torch_eager", "torch_compile"):
        print(f"{name}.vs_{side} ratio {sides[side].median / ours.median:.2f}", flush=True)
    print(f"{name}.gemm_floor_share ratio {sides['gemm_floor'].median / ours.median:.2f}", flush=True)
    for side, taken in sides.items():
        print(
            f"# {side}: {taken.median * 1e3:.1f} ms, {taken.cpu_median * 1e3:.1f} ms of CPU time", flush=True
        )
    return {"name": name, "sides": {k: {**vars(v), "median": v.median} for k, v in sides.items()}}


def recompute(shape: str, dtype: str, rounds: int) -> dict:
    """Time and kept activations of a layer by what it recomputes."""
    from mindferry import kernels
    from mindferry.kernels.settings import LayerSettings

    batch, seq, hidden = sizes(shape)
    parts = {
        "nothing": "mindferry",
        "attention": "mindferry:attention",
        "mlp": "mindferry:mlp",
        "all": "mindferry:all",
    }
    sides = measure({k: command(v, shape, dtype) for k, v in parts.items()}, rounds, note)
    table = {}
    for what in parts:
        settings = LayerSettings(
            hidden,
            hidden // 64,
            hidden // 64,
            64,
            4 * hidden,
            bf16=dtype == "bf16",
            recompute_attention=what in ("attention", "all"),
            recompute_mlp=what in ("mlp", "all"),
        )
        kept = kernels.load().kept_bytes(settings.packed(), seq, batch) + 4 * batch * seq * hidden
        table[what] = {"median": sides[what].median, "kept_bytes": kept, "seconds": sides[what].seconds}
    base = table["nothing"]
    for what in ("attention", "mlp", "all"):
        name = f"layer.{shape}.{dtype}.recompute_{what}"
        print(f"{name}.memory ratio {base['kept_bytes'] / table[what]['kept_bytes']:.2f}", flush=True)
        print(f"{name}.time ratio {base['median'] / table[what]['median']:.2f}", flush=True)
    return {"name": f"layer.{shape}.{dtype}.recompute", "table": table}


def scaling(rounds: int) -> dict:
    """Time and kept activations over S at a fixed number of tokens, and over the batch."""
    from mindferry import kernels
    from mindferry.kernels.settings import LayerSettings

    shapes = [f"B{4096 // s}_S{s}_H768" for s in (256, 512, 1024, 2048, 4096)] + [
        "B1_S256_H768",
        "B4_S256_H768",
    ]
    sides = measure({s: command("mindferry", s, "bf16") for s in shapes}, rounds, note)
    table = {}
    for shape, side in sides.items():
        batch, seq, hidden = sizes(shape)
        settings = LayerSettings(hidden, hidden // 64, hidden // 64, 64, 4 * hidden, bf16=True)
        kept = kernels.load().kept_bytes(settings.packed(), seq, batch)
        table[shape] = {
            "median": side.median,
            "cpu_median": side.cpu_median,
            "kept_bytes": kept,
            "peak_memory_bytes": side.peak_memory_bytes,
        }
        print(
            f"# {shape}: {side.median * 1e3:.1f} ms, {side.cpu_median * 1e3:.1f} ms of CPU time, "
            f"{kept / 2**20:.1f} MiB kept, peak {side.peak_memory_bytes / 2**20:.0f} MiB",
            flush=True,
        )
    return {"name": "layer.scaling", "table": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--dtype", nargs="+", default=("bf16", "fp32"), choices=("bf16", "fp32"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scaling", action="store_true", help="times over sequence length and batch instead")
    parser.add_argument(
        "--recompute", action="store_true", help="times and memory by recomputed part instead"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/layer.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.shape[0], args.dtype[0])
        return
    results = []
    if args.scaling:
        results.append(scaling(args.rounds))
    else:
        for shape in args.shape:
            for dtype in args.dtype:
                run = recompute if args.recompute else compare
                results.append(run(shape, dtype, args.rounds))
    write_results(args.out, {"results": json.loads(json.dumps(results))})


if __name__ == "__main__":
    main()
