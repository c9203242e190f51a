"""A whole GPT-2 124M training step, optimizer included: mindferry against the portable layers and PyTorch.

python -m benchmarks.model [--shape B4_S512 B1_S1024] [--dtype bf16] [--sides torch portable] [--rounds 7]
python -m benchmarks.model --scaling [--rounds 7]

Every step is forward, cross-entropy, backward, clipping to norm 1 and AdamW, on the same random tokens. The
sides take turns; each comparison holds two processes in memory. The portable layers compute in float32, as
MindSpore has no bfloat16 products on a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from pathlib import Path

from benchmarks.interleave import Side, measure, serve, write_results
from benchmarks.layer import note

MODELS = {
    "gpt2_124m": {"vocab_size": 50257, "hidden_size": 768, "num_layers": 12, "num_heads": 12},
    "gpt2_tiny": {"vocab_size": 8192, "hidden_size": 768, "num_layers": 4, "num_heads": 12},
    **{
        f"layers_{n}": {"vocab_size": 1024, "hidden_size": 768, "num_layers": n, "num_heads": 12}
        for n in (2, 4, 8)
    },
}
SHAPES = ("B4_S512", "B1_S1024")
LEARNING_RATE, BETAS, DECAY = 3e-4, (0.9, 0.95), 0.1


def sizes(shape: str) -> tuple[int, int]:
    match = re.fullmatch(r"B(\d+)_S(\d+)", shape)
    if match is None:
        raise SystemExit(f"--shape: found {shape!r}, expected something like B4_S512")
    return int(match[1]), int(match[2])


def tokens(model: str, shape: str):
    import numpy as np

    batch, seq = sizes(shape)
    ids = np.random.default_rng(0).integers(0, MODELS[model]["vocab_size"], (batch, seq + 1)).astype(np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def mindspore_side(
    model: str, shape: str, dtype: str, layer_spec: str, recompute: bool = False, graph_kernel: bool = False
) -> None:
    import numpy as np

    from benchmarks.interleave import quiet_mindspore

    quiet_mindspore()
    import mindspore as ms
    from mindformers.wrapper import wrapper
    from mindspore import nn

    from mindferry.training import compat
    from mindferry.training.models import GPT2Config, GPT2ForTraining

    compat.graph_kernel(graph_kernel)
    batch, seq = sizes(shape)
    fused = layer_spec == "fused"
    net = GPT2ForTraining(
        GPT2Config(
            **MODELS[model],
            ffn_hidden_size=4 * MODELS[model]["hidden_size"],
            seq_length=seq,
            max_position_embeddings=1024,
            embedding_dropout=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            compute_dtype="bfloat16" if dtype == "bf16" and fused else "float32",
            layer_spec=layer_spec,
        )
    )
    if recompute:
        for layer in net.model.decoder.layers:
            layer.recompute()
    params = net.trainable_params()
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
        {"order_params": params},
    ]
    if fused:
        from mindferry.training.kernel_step import KernelAdamW as Optimizer
        from mindferry.training.kernel_step import KernelTrainOneStepCell as StepCell
    else:
        from mindformers.core.optim.adamw import AdamW as Optimizer

        from mindferry.training.wrappers import PortableTrainOneStepCell as StepCell

    class Ordered(nn.Cell):
        """Positional inputs, as mindformers' Trainer feeds them."""

        def __init__(self):
            super().__init__(auto_prefix=False)
            self.net = net

        def construct(self, ids, labels, mask, places):
            return self.net(input_ids=ids, labels=labels, loss_mask=mask, position_ids=places)

    wrapper.get_real_models = lambda _: net
    optimizer = Optimizer(groups, learning_rate=LEARNING_RATE, betas=BETAS)
    step = StepCell(Ordered(), optimizer, use_clip_grad=True, max_grad_norm=1.0, scale_sense=1.0)
    step.set_train(True)
    ids, labels = tokens(model, shape)
    places = np.tile(np.arange(seq, dtype=np.int32), (batch, 1))
    inputs = [ms.Tensor(a) for a in (ids, labels, np.ones((batch, seq), np.float32), places)]

    def once() -> None:
        loss = float(step(*inputs)[0].asnumpy().reshape(-1)[0])
        if not math.isfinite(loss):
            raise SystemExit(f"loss is {loss}")

    serve(once)


def torch_side(model: str, shape: str, dtype: str) -> None:
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size = MODELS[model]
    hidden, heads, vocab = size["hidden_size"], size["num_heads"], size["vocab_size"]

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.n1, self.n2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
            self.qkv, self.proj = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
            self.fc1, self.fc2 = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            q, k, v = self.qkv(self.n1(x)).split(hidden, 2)
            q, k, v = (t.view(*t.shape[:2], heads, -1).transpose(1, 2) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).flatten(2))
            return x + self.fc2(F.gelu(self.fc1(self.n2(x)), approximate="tanh"))

    class Gpt(torch.nn.Module):
        """nanoGPT's model: tied head, learned positions."""

        def __init__(self):
            super().__init__()
            self.words, self.places = torch.nn.Embedding(vocab, hidden), torch.nn.Embedding(1024, hidden)
            self.blocks = torch.nn.ModuleList(Block() for _ in range(size["num_layers"]))
            self.norm = torch.nn.LayerNorm(hidden)
            for p in self.parameters():
                if p.ndim > 1:
                    torch.nn.init.normal_(p, 0, 0.02)

        def forward(self, ids, labels):
            x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.norm(x), self.words.weight)
            return F.cross_entropy(logits.view(-1, vocab), labels.view(-1))

    gpt = Gpt()
    groups = [
        {"params": [p for p in gpt.parameters() if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in gpt.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)
    ids, labels = (torch.tensor(a).long() for a in tokens(model, shape))

    def once() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = gpt(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            raise SystemExit(f"loss is {loss.item()}")

    serve(once)


def worker(side: str, model: str, shape: str, dtype: str) -> None:
    if side == "torch":
        torch_side(model, shape, dtype)
    else:
        spec = "portable" if side.startswith("portable") else "fused"
        ends = {"recompute": side.endswith("recompute"), "graph_kernel": side.endswith("graph_kernel")}
        mindspore_side(model, shape, dtype, spec, **ends)


def command(side: str, model: str, shape: str, dtype: str) -> list[str]:
    base = [sys.executable, "-m", "benchmarks.model", "--model", model, "--shape", shape, "--dtype", dtype]
    return [*base, "--worker", side]


def scaling(rounds: int) -> dict:
    """Time and peak memory of a step over the number of layers, and over the batch."""
    cases = [("layers_2", "B1_S256"), ("layers_4", "B1_S256"), ("layers_8", "B1_S256")]
    cases += [("layers_4", "B2_S256"), ("layers_4", "B4_S256"), ("layers_4", "B8_S256")]
    commands = {f"{model}.{shape}": command("mindferry", model, shape, "bf16") for model, shape in cases}
    table = {}
    for name, side in measure(commands, rounds, note).items():
        table[name] = {**vars(side), "median": side.median, "cpu_median": side.cpu_median}
        print(
            f"# {name}: {side.median * 1e3:.0f} ms, {side.cpu_median * 1e3:.0f} ms of CPU time, "
            f"peak {side.peak_memory_bytes / 2**20:.0f} MiB",
            flush=True,
        )
    return {"name": "model.scaling", "table": table}


def compare(model: str, shape: str, dtype: str, other: str, rounds: int) -> dict:
    """mindferry and one other side in turns; prints tokens per second and peak memory ratios."""
    commands = {side: command(side, model, shape, dtype) for side in ("mindferry", other)}
    sides = measure(commands, rounds, note)
    ours, theirs = sides["mindferry"], sides[other]
    name = f"model.{model}.{shape}.{dtype}"
    batch, seq = sizes(shape)

    def row(side: Side) -> dict:
        return {**vars(side), "median": side.median, "tokens_per_second": batch * seq / side.median}

    print(f"{name}.tokens_per_second.vs_{other} ratio {theirs.median / ours.median:.2f}", flush=True)
    print(f"{name}.cpu_time.vs_{other} ratio {theirs.cpu_median / ours.cpu_median:.2f}", flush=True)
    if ours.peak_memory_bytes and theirs.peak_memory_bytes:
        print(
            f"{name}.peak_memory.vs_{other} ratio {theirs.peak_memory_bytes / ours.peak_memory_bytes:.2f}",
            flush=True,
        )
    return {"name": name, "other": other, "sides": {k: row(v) for k, v in sides.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2_124m", choices=MODELS)
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--dtype", nargs="+", default=("bf16",), choices=("bf16", "fp32"))
    parser.add_argument(
        "--sides",
        nargs="+",
        default=("torch", "portable"),
        choices=("torch", "portable", "recompute", "graph_kernel", "portable_graph_kernel"),
    )
    parser.add_argument("--scaling", action="store_true", help="a step over layers and batch instead")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/model.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.model, args.shape[0], args.dtype[0])
        return
    if args.scaling:
        write_results(args.out, {"results": [scaling(args.rounds)]})
        return
    results = [
        compare(args.model, shape, dtype, other, args.rounds)
        for shape in args.shape
        for dtype in args.dtype
        for other in args.sides
    ]
    write_results(args.out, {"results": results})


if __name__ == "__main__":
    main()
