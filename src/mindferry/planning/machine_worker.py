"""Measures one thing in a process of its own and writes it as JSON: python machine_worker.py KIND ARGS OUT.

The planner itself imports no MindSpore; what needs it runs here. ARGS and OUT: a JSON object, and the file to write.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A step that takes this much longer than its processor time over the cores was held up by other programs.
BUSY = 1.3


def undisturbed(wall: list[float], processor: list[float], cores: int) -> float:
    """Seconds of a repeated piece of work on the machine alone.

    The shortest wall time, unless other programs held all of them up: then the median processor time over the cores,
    which they hardly change (and which is a few percent too short, as no work keeps all cores busy throughout).
    """
    shortest, ideal = min(wall), sorted(processor)[len(processor) // 2] / cores
    return shortest if shortest <= BUSY * ideal or ideal <= 0 else ideal


def _best(call: Callable[[], Any], seconds: float = 2.0) -> float:
    """Undisturbed time of repeated calls within `seconds`, after one to warm up."""
    call()
    wall: list[float] = []
    processor: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(wall) < 3:
        start, used = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return undisturbed(wall, processor, os.cpu_count() or 1)


def gemm(args: dict[str, Any]) -> dict[str, Any]:
    """FLOP/s of float32 products of a GPT-2 layer's shapes, forward and both backward forms, compiled by MindSpore."""
    import mindspore as ms
    import numpy as np

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    rng = np.random.default_rng(0)
    flops = seconds = 0.0
    for m, k, n in ((1024, 768, 2304), (1024, 768, 3072), (1024, 3072, 768)):
        a = ms.Tensor(rng.standard_normal((m, k), np.float32))
        b = ms.Tensor(rng.standard_normal((k, n), np.float32))
        g = ms.Tensor(rng.standard_normal((m, n), np.float32))
        for x, y, ta, tb in ((a, b, False, False), (g, b, False, True), (a, g, True, False)):
            # a sum over the product waits for it without copying it out
            seconds += _best(functools.partial(_run, _products()(ta, tb), x, y), 0.7)
            flops += 2.0 * m * k * n
    return {"flops": flops / seconds}


def _run(net: Any, x: Any, y: Any) -> Any:
    return net(x, y).asnumpy()


def _products() -> Any:
    """The class of a network that multiplies and sums."""
    import mindspore as ms
    from mindspore import ops

    class Product(ms.nn.Cell):
        def __init__(self, transpose_a: bool, transpose_b: bool) -> None:
            super().__init__()
            self.product = ops.MatMul(transpose_a, transpose_b)
            self.total = ops.ReduceSum()

        def construct(self, x, y):
            return self.total(self.product(x, y))

    return Product


def bandwidth(args: dict[str, Any]) -> dict[str, Any]:
    """Bytes/s of c = a + b on arrays far beyond the caches, through MindSpore."""
    import mindspore as ms
    import numpy as np
    from mindspore import ops

    size = 1 << 25
    a, b = ms.Tensor(np.ones(size, np.float32)), ms.Tensor(np.ones(size, np.float32))
    add = ops.Add()
    seconds = _best(lambda: add(a, b).asnumpy().flat[0])
    return {"bytes_per_second": 12.0 * size / seconds}


def collective(args: dict[str, Any]) -> dict[str, Any]:
    """Seconds of an all-reduce of several sizes between the processes that msrun started."""
    import mindspore as ms
    import numpy as np
    from mindspore import ops
    from mindspore.communication import get_group_size, init

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    init()
    reduce = ops.AllReduce()

    class Net(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.reduce = reduce

        def construct(self, x):
            return self.reduce(x)

    net, times = Net(), {}
    for size in args["sizes"]:
        try:
            times[str(size)] = _median_seconds(net, ms.Tensor(np.ones(size // 4, np.float32)))
        except RuntimeError:
            # MindSpore's CPU collectives give up when the ranks drift too far apart; smaller sizes stand.
            if not times:
                raise
            break
    return {"ranks": get_group_size(), "seconds": times}


def _median_seconds(net: Any, x: Any) -> float:
    net(x).asnumpy()
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        net(x).asnumpy()
        rounds.append(time.perf_counter() - start)
    return sorted(rounds)[2]


def step(args: dict[str, Any]) -> dict[str, Any]:
    """Step times and peak memory of a few real training steps of a GPT-2 of the given size, random weights."""
    from mindferry.spec import Precision, Recipe, Schedule
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training.engine import Options, train

    root = Path(args["root"])
    spec = _spec(args)
    steps, batch, seq = args["steps"], args["batch_size"], args["seq_length"]
    recipe = Recipe(schedule=Schedule(kind="constant", learning_rate=1e-4, total_steps=steps), precision=Precision(),
                    seq_length=seq, batch_size=batch)  # fmt: skip
    content = run_yaml.build(spec, recipe, steps_per_epoch=steps, layer_spec=args["layer_spec"], device="CPU")
    content["callbacks"] = [c for c in content["callbacks"] if c["type"] != "CheckpointMonitor"]
    root.mkdir(parents=True, exist_ok=True)
    (root / "run.yaml").write_text(run_yaml.dump(content), encoding="utf-8")
    _random_weights(root / "model", spec)
    _random_rows(root / "data", spec.vocab_size, seq, batch * steps)
    run = RunDirectory.open(root)
    records: list[dict[str, Any]] = []
    processor: list[float] = [time.process_time()]

    def seen(record: dict[str, Any]) -> None:
        records.append(record)
        processor.append(time.process_time())

    train(run, Options(on_step=seen))
    return {
        "seconds": [r["compute_time"] for r in records],
        "processor_seconds": [b - a for a, b in itertools.pairwise(processor)],
        "peak_bytes": records[-1]["peak_memory_bytes"],
    }


def _spec(args: dict[str, Any]) -> Any:
    from mindferry.planning import settings

    base = settings.preset("gpt2")
    changes = {
        "num_layers": args["num_layers"],
        "embedding_dropout": 0.0,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return base.model_copy(update=changes)


def _random_weights(folder: Path, spec: Any) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    h, f, rng = spec.hidden_size, spec.ffn_hidden_size, np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    tensors = {"embedding.word_embeddings.weight": matrix(spec.vocab_size, h),
               "embedding.position_embeddings.weight": matrix(spec.max_position_embeddings, h)}  # fmt: skip
    norms = ["decoder.final_layernorm"]
    for i in range(spec.num_layers):
        layer = f"decoder.layers.{i}"
        norms += [f"{layer}.input_layernorm", f"{layer}.pre_mlp_layernorm"]
        for name, rows, columns in (("self_attention.linear_qkv", 3 * h, h), ("self_attention.linear_proj", h, h),
                                    ("mlp.linear_fc1", f, h), ("mlp.linear_fc2", h, f)):  # fmt: skip
            tensors[f"{layer}.{name}.weight"] = matrix(rows, columns)
            tensors[f"{layer}.{name}.bias"] = np.zeros(rows, np.float32)
    for name in norms:
        tensors[f"{name}.gamma"], tensors[f"{name}.beta"] = np.ones(h, np.float32), np.zeros(h, np.float32)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def _random_rows(folder: Path, vocab: int, seq: int, rows: int) -> None:
    import numpy as np
    from mindspore.mindrecord import FileWriter

    folder.mkdir(exist_ok=True)
    writer = FileWriter(str(folder / "train.mindrecord"), shard_num=1, overwrite=True)
    columns = ("input_ids", "labels", "loss_mask", "position_ids")
    writer.add_schema({name: {"type": "int32", "shape": [seq]} for name in columns}, "random")
    rng = np.random.default_rng(0)
    for _ in range(rows):
        tokens = rng.integers(0, vocab, seq + 1, dtype=np.int32)
        writer.write_raw_data([{"input_ids": tokens[:-1], "labels": tokens[1:], "loss_mask": np.ones(seq, np.int32),
                                "position_ids": np.arange(seq, dtype=np.int32)}])  # fmt: skip
    writer.commit()


KINDS = {"gemm": gemm, "bandwidth": bandwidth, "collective": collective, "step": step}


def main() -> None:
    kind, args, out = sys.argv[1:4]
    result = KINDS[kind](json.loads(args))
    if int(os.environ.get("RANK_ID", "0")) == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
