"""One side of a benchmark as a process of its own: `python -m mindferry.checking.bench_worker TASK.json`.

It answers on stdout, a JSON line a command: "ready" once warm, then per line of stdin a measurement:
"step" one optimizer step; "parts" builds forward and backward alone; "forward", "backward" one pass each;
"end" the peak. Everything libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mindferry.training.memory import status_bytes

WARM_STEPS = 3


class Line:
    """The answers, on the stdout that the process was started with."""

    def __init__(self, log: str) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)

    def say(self, **values: Any) -> None:
        self._out.write(json.dumps(values) + "\n")
        self._out.flush()

    def asked(self) -> str:
        """The next command; "end" when the asker is gone."""
        return sys.stdin.readline().strip() or "end"


class Ended(Exception):
    """The asker wants no more."""


def mindspore_side(task: dict[str, Any], line: Line) -> None:
    """Trains a copy of the run through mindformers' Trainer, one step a command."""
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    run = RunDirectory(Path(task["run"]))
    original = run_yaml.read(run.yaml)
    steps = WARM_STEPS + int(task["steps"])
    overrides = {
        "lr_schedule.total_steps": max(original["lr_schedule"]["total_steps"], steps),
        "callbacks": [c for c in original["callbacks"] if c["type"] != "CheckpointMonitor"],
        **task.get("overrides", {}),
    }
    state: dict[str, Any] = {"waited": 0.0, "start": time.perf_counter(), "runtime": 0, "batch": None}

    def on_batch(step: int, batch: tuple[Any, ...]) -> None:
        state["batch"] = batch

    def on_step(record: dict[str, Any]) -> None:
        step = record["step"]
        data = record["data_time"] - state["waited"]
        if step == 1:
            state["first"] = time.perf_counter() - state["start"]
        took = {"step": record["compute_time"] + data, "compute": record["compute_time"], "data": data}
        if step > WARM_STEPS:
            line.say(took=took, loss=record["loss"])
        elif step == WARM_STEPS:
            line.say(ready=True, start_seconds=state["first"])
        before = time.perf_counter()
        if step >= WARM_STEPS and step < steps:
            wanted = line.asked()
            if wanted != "step":
                raise Ended
        state["waited"] = time.perf_counter() - before

    with tempfile.TemporaryDirectory(prefix="mindferry-bench-") as scratch:
        copy = RunDirectory(Path(scratch))
        for name in ("run.yaml", "model", "data"):
            (copy.root / name).symlink_to(run.root / name)
        options = engine.Options(steps=steps, overrides=overrides, on_step=on_step, on_batch=on_batch)
        _import_engine()
        state["runtime"] = status_bytes("VmRSS")
        try:
            engine.train(copy, options)
        except Ended:
            return
        peak = status_bytes("VmHWM")
        content = engine.prepare(copy, options)
        _parts(content, copy, state, peak, line)


def _import_engine() -> None:
    import mindformers  # noqa: F401
    import mindspore  # noqa: F401


def _parts(content: dict[str, Any], run: Any, state: dict[str, Any], peak: int, line: Line) -> None:
    """Forward, and forward with backward, of one micro-batch as compiled pieces of their own."""
    if line.asked() != "parts":
        line.say(peak=peak, runtime=state["runtime"])
        return
    from mindferry.checking import sides
    from mindferry.training import engine

    config = engine.set_up(content, run)
    network = sides.build_network(content, config)
    sides.load_weights(network, Path(content["load_checkpoint"]))
    network.set_train(True)
    rows = content["runner_config"]["batch_size"]
    inputs = tuple(value[:rows] for value in state["batch"])
    forward, backward = _passes(network)
    calls = {
        "forward": lambda: forward(*inputs).asnumpy(),
        "backward": lambda: backward(*inputs)[-1].asnumpy(),
    }
    for call in calls.values():
        call()
        call()
    parameters = network.get_parameters()
    trainable = network.trainable_params()
    line.say(
        ready=True,
        parameters=sum(p.size * p.itemsize for p in parameters),
        gradients=sum(p.size * p.itemsize for p in trainable),
        optimizer=sum(2 * p.size * 4 for p in trainable),
    )
    _serve(calls, line)
    line.say(peak=peak, runtime=state["runtime"])


def _serve(calls: dict[str, Any], line: Line) -> None:
    while (wanted := line.asked()) in calls:
        start = time.perf_counter()
        calls[wanted]()
        line.say(took={wanted: time.perf_counter() - start})


def _passes(network: Any) -> tuple[Any, Any]:
    from mindspore import ParameterTuple, nn, ops

    class Forward(nn.Cell):
        """The loss of a batch."""

        def __init__(self):
            super().__init__(auto_prefix=False)
            self.network = network

        def construct(self, ids, labels, mask, positions):
            return self.network(input_ids=ids, labels=labels, loss_mask=mask, position_ids=positions)[0]

    class Backward(nn.Cell):
        """Its gradients."""

        def __init__(self, forward):
            super().__init__(auto_prefix=False)
            self.forward = forward
            self.weights = ParameterTuple(network.trainable_params())
            self.grad = ops.GradOperation(get_by_list=True)

        def construct(self, ids, labels, mask, positions):
            return self.grad(self.forward, self.weights)(ids, labels, mask, positions)

    forward = Forward()
    return forward, Backward(forward)


def torch_side(task: dict[str, Any], line: Line) -> None:
    """The source in transformers: forward, backward, clipping and AdamW on a batch of the run."""
    import numpy as np
    import torch

    from mindferry.checking import parity, sides
    from mindferry.sources import open_source

    start = time.perf_counter()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    runtime = status_bytes("VmRSS")
    stored = np.load(task["batch"])
    batch = sides.Batch(*(stored[name] for name in ("input_ids", "labels", "loss_mask", "position_ids")))
    with tempfile.TemporaryDirectory(prefix="mindferry-source-") as scratch:
        source = open_source(Path(task["source"]), assume=task["assume"])
        model = sides.load_torch_model(sides.huggingface_form(source, Path(scratch)))
    model.set_attn_implementation("sdpa")
    model.train()
    optimizer = torch.optim.AdamW(
        parity.decay_groups(model, task["weight_decay"]),
        lr=task["learning_rate"],
        betas=tuple(task["betas"]),
        eps=task["eps"],
    )
    count = int(task["accumulation"])
    pieces = [sides.Batch(*(np.array_split(v, count)[i] for v in vars(batch).values())) for i in range(count)]

    def once() -> dict[str, float]:
        times = {"forward": 0.0, "backward": 0.0}
        optimizer.zero_grad(set_to_none=True)
        for piece in pieces:
            a = time.perf_counter()
            ids = torch.from_numpy(piece.input_ids.astype(np.int64))
            loss = sides.torch_loss(model(input_ids=ids, use_cache=False).logits, piece) / count
            b = time.perf_counter()
            loss.backward()
            times["forward"] += b - a
            times["backward"] += time.perf_counter() - b
        c = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task["max_grad_norm"])
        optimizer.step()
        times["optimizer"] = time.perf_counter() - c
        times["step"] = sum(times.values())
        return times

    once()
    first = time.perf_counter() - start
    for _ in range(WARM_STEPS - 1):
        once()
    line.say(ready=True, start_seconds=first)
    while line.asked() == "step":
        line.say(took=once())
    line.say(peak=status_bytes("VmHWM"), runtime=runtime)


def main(path: str) -> None:
    """Run the task; a failure is the last answer."""
    task = json.loads(Path(path).read_text(encoding="utf-8"))
    line = Line(task["log"])
    try:
        {"mindspore": mindspore_side, "torch": torch_side}[task["kind"]](task, line)
    except Exception as err:
        import traceback

        traceback.print_exc()
        text = next((text for text in str(err).splitlines() if text.strip()), "")
        line.say(failed=f"{type(err).__name__}: {text.strip()}"[:500])
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
