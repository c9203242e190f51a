"""One side of a benchmark as a process of its own: `python -m mindferry.checking.bench_worker TASK.json`.

It answers on stdout, a JSON line a command: "ready" once warm, then per line of stdin a measurement:
"step" one optimizer step; "operators" a few more under MindSpore's profiler; "parts" builds forward, backward and
update alone; "forward", "backward", "optimizer" one each; "layers" builds each part of the model, "layer" runs all of
them once; "end" the peak. Everything libraries print goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindferry.training.memory import status_bytes

WARM_STEPS = 3
PROFILED_STEPS = 3


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


def linked_copy(run: Any, folder: Path) -> Any:
    """A run directory in `folder` that trains what `run` does and leaves `run` alone."""
    from mindferry.targets.run_directory import RunDirectory

    for name in ("run.yaml", "model", "data"):
        (folder / name).symlink_to(run.root / name)
    return RunDirectory(folder)


def measured_overrides(run: Any, last: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Overrides for `last` steps without checkpoints, and `overrides` on top."""
    from mindferry.targets import run_yaml

    original = run_yaml.read(run.yaml)
    return {
        "lr_schedule.total_steps": max(original["lr_schedule"]["total_steps"], last),
        "callbacks": [c for c in original["callbacks"] if c["type"] != "CheckpointMonitor"],
        **overrides,
    }


def mindspore_side(task: dict[str, Any], line: Line) -> None:
    """Trains a copy of the run through mindformers' Trainer, one step a command."""
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine

    with tempfile.TemporaryDirectory(prefix="mindferry-bench-") as scratch:
        copy = linked_copy(RunDirectory(Path(task["run"])), Path(scratch))
        steps = _Steps(line, int(task["steps"]), PROFILED_STEPS if task.get("operators") else 0, copy.root)
        _import_engine()
        steps.runtime = status_bytes("VmRSS")
        overrides = measured_overrides(copy, steps.last, task.get("overrides", {}))
        overrides["callbacks"] = [*overrides["callbacks"], {"type": _keeps_network(steps)}]
        options = engine.Options(
            steps=steps.last, overrides=overrides, on_step=steps.ended, on_batch=steps.begins
        )
        try:
            engine.train(copy, options)
        except Ended:
            return
        _parts(engine.prepare(copy, options), copy, steps, line)


class _Steps:
    """The training steps: warm-up, then one a command, then those under the profiler.

    Attributes:
        last: number of the last step.
        batch: of the last step, device tensors.
        network: the training step (mindformers' wrapper), set before the first.
        runtime, peak: resident bytes with the libraries loaded, and at most until the profiler began.
    """

    def __init__(self, line: Line, measured: int, profiled: int, folder: Path) -> None:
        self._line, self._profiled = line, profiled
        self._measured = WARM_STEPS + measured
        self.last = self._measured + profiled
        self._start, self._first, self._waited = time.perf_counter(), 0.0, 0.0
        self._profile: Any = None
        self._folder, self._seconds = folder / "profile", 0.0
        self.batch: tuple[Any, ...] = ()
        self.network: Any = None
        self.runtime = self.peak = 0

    def begins(self, step: int, batch: tuple[Any, ...]) -> None:
        self.batch = batch

    def ended(self, record: dict[str, Any]) -> None:
        """Answer for this step, and wait for the next command."""
        step = record["step"]
        data = record["data_time"] - self._waited
        if step == 1:
            self._first = time.perf_counter() - self._start
        if step == WARM_STEPS:
            self._line.say(ready=True, start_seconds=self._first)
        elif WARM_STEPS < step <= self._measured:
            took = {"step": record["compute_time"] + data, "compute": record["compute_time"], "data": data}
            self._line.say(took=took, loss=record["loss"])
        elif step > self._measured:
            self._seconds += record["compute_time"]
        before = time.perf_counter()
        if step == self._measured:
            self.peak = status_bytes("VmHWM")
        if WARM_STEPS <= step < self._measured and self._line.asked() != "step":
            raise Ended
        if step == self._measured and self._profiled:
            self._start_profile()
        if step == self.last and self._profile is not None:
            self._line.say(operators=self._operators())
        self._waited = time.perf_counter() - before

    def _start_profile(self) -> None:
        from mindferry.checking.operators import Profile

        if self._line.asked() != "operators":
            raise Ended
        self._profile = Profile(self._folder)
        self._profile.start()

    def _operators(self) -> dict[str, Any]:
        from mindferry.checking import operators

        seen = self._profile.stop()
        if not seen:
            return {"failed": "MindSpore's profiler left no times of operators on this device"}
        return operators.table(seen, self._profiled, self._seconds / self._profiled)


def _keeps_network(steps: _Steps) -> str:
    """Register a callback that keeps the training step; returns its name for run.yaml."""
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
    from mindspore.train.callback import Callback

    class KeepNetwork(Callback):
        def on_train_begin(self, run_context: Any) -> None:
            steps.network = run_context.original_args().train_network

    MindFormerRegister.register_cls(KeepNetwork, MindFormerModuleType.CALLBACK, "MindferryKeepNetwork")
    return "MindferryKeepNetwork"


def _import_engine() -> None:
    import mindformers  # noqa: F401
    import mindspore  # noqa: F401


def _parts(content: dict[str, Any], run: Any, steps: _Steps, line: Line) -> None:
    """Forward, forward with backward of one micro-batch, and the update, as compiled pieces of their own."""
    if line.asked() != "parts":
        line.say(peak=steps.peak, runtime=steps.runtime)
        return
    from mindferry.checking import layer_times, sides
    from mindferry.training import engine

    config = engine.set_up(content, run)
    network = sides.build_network(content, config)
    sides.load_weights(network, Path(content["load_checkpoint"]))
    network.set_train(True)
    rows = content["runner_config"]["batch_size"]
    inputs = tuple(value[:rows] for value in steps.batch)
    forward, backward = _passes(network)
    calls = {
        "forward": lambda: forward(*inputs).asnumpy(),
        "backward": lambda: backward(*inputs)[-1].asnumpy(),
        "optimizer": _update(steps.network),
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
    wanted = _serve(calls, line)
    if wanted == "layers":
        pieces = layer_times.pieces(network, inputs, content["context"]["mode"])
        pieces |= {"whole/forward": calls["forward"], "whole/both": calls["backward"]}
        line.say(ready=True)
        while (wanted := line.asked()) == "layer":
            line.say(took=layer_times.time_all(pieces))
    line.say(peak=steps.peak, runtime=steps.runtime)


def _serve(calls: dict[str, Any], line: Line) -> str:
    """Answer for `calls`; returns the first command that is none of them."""
    while (wanted := line.asked()) in calls:
        start = time.perf_counter()
        calls[wanted]()
        line.say(took={wanted: time.perf_counter() - start})
    return wanted


def _update(step: Any) -> Callable[[], Any]:
    """Overflow check, clipping and optimizer of the training step `step`, on gradients of zeros."""
    from mindspore import nn, ops

    from mindferry.training.wrappers import _overflowed

    class Update(nn.Cell):
        """What the step does once the gradients are there."""

        def __init__(self):
            super().__init__(auto_prefix=False)
            self.clip, self.optimizer, self.each = step.clip_grad_norm, step.optimizer, ops.HyperMap()

        def construct(self, *gradients):
            overflow = ops.AddN()(self.each(_overflowed, gradients)) > 0.0
            clipped, norm = self.clip(gradients)
            return ops.depend(norm, self.optimizer(clipped)), overflow

    update = Update()
    gradients = [ops.zeros_like(weight) for weight in step.weights]
    return lambda: update(*gradients)[0].asnumpy()


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
        if task["kind"] == "workers":
            from mindferry.checking.bench_ranks import ranks_side

            ranks_side(task, line)
        else:
            {"mindspore": mindspore_side, "torch": torch_side}[task["kind"]](task, line)
    except Exception as err:
        import traceback

        traceback.print_exc()
        text = next((text for text in str(err).splitlines() if text.strip()), "")
        line.say(failed=f"{type(err).__name__}: {text.strip()}"[:500])
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
