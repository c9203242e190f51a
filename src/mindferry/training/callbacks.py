"""MindSpore callbacks of a training run: one metrics line a step, checkpoints, a clean end."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mindspore.train.callback import Callback

from mindferry.errors import MindferryError
from mindferry.layers.dropout import COUNTER, count_steps
from mindferry.training import checkpoints
from mindferry.training.interruption import Interruption, StopFile
from mindferry.training.loss_scale import ScaleWatch
from mindferry.training.memory import status_bytes
from mindferry.training.outcome import Outcome
from mindferry.training.wrappers import TRANSIENT


def _scalar(value: Any) -> float | None:
    if value is None:
        return None
    array = value.asnumpy() if hasattr(value, "asnumpy") else np.asarray(value)
    return float(array.reshape(-1)[0]) if array.size else None


class StepMetrics(Callback):
    """Append one JSON line to metrics.jsonl after every optimizer step (seconds, bytes).

    data_time is the wait for the batch, compute_time the step on the device until its results are read;
    step_time is from the end of the step before, callbacks included. On several processes compute_time consists
    of forward_backward_time, wait_time (for the slowest process), reduce_time (the gradients, `reductions` times)
    and the update; `tokens` and `rank_loss` are this process' own; loss is the mean over all, tokens_per_second
    the sum.
    """

    def __init__(
        self,
        path: Path,
        outcome: Outcome,
        start_step: int,
        last_step: int,
        on_step: Callable[[dict[str, Any]], None],
        interruption: Interruption | StopFile,
        on_batch: Callable[[int, tuple[Any, ...]], None] | None = None,
        watch: ScaleWatch | None = None,
        workers: int = 1,
    ) -> None:
        super().__init__()
        self._watch, self._workers = watch or ScaleWatch(), workers
        self._path, self._outcome, self._start, self._last = path, outcome, start_step, last_step
        self._on_step, self._interruption, self._on_batch = on_step, interruption, on_batch

    def on_train_begin(self, run_context: Any) -> None:
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed in on_train_end
        self._previous_end = time.perf_counter()

    def on_train_step_begin(self, run_context: Any) -> None:
        self._begin = time.perf_counter()
        self._batch = run_context.original_args().train_dataset_element
        if self._on_batch is not None:
            step = self._start + run_context.original_args().cur_step_num
            self._on_batch(step, self._batch)
        exchange = self._exchange(run_context)
        if exchange is not None:
            exchange.wants_to_stop = bool(self._interruption.number)
            exchange.begin()

    @staticmethod
    def _exchange(run_context: Any) -> Any:
        return getattr(run_context.original_args().train_network, "exchange", None)

    def on_train_step_end(self, run_context: Any) -> None:
        params = run_context.original_args()
        outputs = params.net_outputs
        loss = _scalar(outputs[0])
        end = time.perf_counter()
        step = self._start + params.cur_step_num
        step_time = end - self._previous_end
        own_tokens = int(np.prod(self._batch[0].shape))
        tokens = own_tokens * self._workers
        exchange = self._exchange(run_context)
        record = {
            "step": step,
            "loss": loss,
            "lr": _scalar(outputs[3]),
            "grad_norm": _scalar(outputs[4]),
            "loss_scale": _scalar(outputs[2]),
            "overflow": bool(_scalar(outputs[1])),
            "data_time": self._begin - self._previous_end,
            "compute_time": end - self._begin,
            "step_time": step_time,
            "tokens_per_second": tokens / step_time,
            "peak_memory_bytes": status_bytes("VmHWM"),
            "skipped_steps": self._watch.skipped + bool(_scalar(outputs[1])),
        }
        if exchange is not None:
            record |= {
                "forward_backward_time": exchange.phases.compute,
                "wait_time": exchange.phases.wait,
                "reduce_time": exchange.phases.reduce,
                "reductions": exchange.phases.reductions,
                "tokens": own_tokens,
                "rank_loss": exchange.phases.loss,
            }
        self._file.write(json.dumps(_finite(record)) + "\n")
        self._file.flush()
        self._outcome.losses[step] = math.nan if loss is None else loss
        self._outcome.last_step = step
        self._on_step(record)
        if record["overflow"]:
            self._outcome.skipped.append(step)
        self._watch.see(step, record["overflow"], record["loss_scale"], loss)
        number = self._interruption.number
        if exchange is not None:
            # All processes must make the same number of steps, so all go by what was agreed in this one.
            number = (number or signal.SIGTERM) if exchange.stop_agreed else 0
        self._outcome.signal = number
        if number:
            run_context.request_stop()
        if step >= self._last:
            run_context.request_stop()
        self._previous_end = end

    def on_train_end(self, run_context: Any) -> None:
        self._file.close()


def _finite(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: write it as a string that a reader cannot miss."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of the moments that this process keeps."""
    return sum(p.nbytes for states in (optimizer.exp_avg, optimizer.exp_avg_sq) for p in states)


class CommittedCheckpoints(Callback):
    """Save every `every` steps, at the end, and on request; see mindferry.training.checkpoints.

    Must run after StepMetrics, which decides when to stop. On several processes rank 0 writes.
    """

    def __init__(
        self,
        root: Path,
        outcome: Outcome,
        *,
        every: int,
        keep: int,
        model: Any,
        state: dict[str, Any],
        watch: ScaleWatch,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self._watch, self._rank = watch, rank
        self._root, self._outcome, self._every, self._keep = root, outcome, every, keep
        self._model, self._state = model, state
        self._saved = -1

    def on_train_step_end(self, run_context: Any) -> None:
        step = self._outcome.last_step
        if step % self._every == 0 or run_context.get_stop_requested():
            self._save(run_context, step)

    def on_train_end(self, run_context: Any) -> None:
        if self._outcome.last_step > self._outcome.first_step:
            self._save(run_context, self._outcome.last_step)

    def _save(self, run_context: Any, step: int) -> None:
        if step == self._saved:
            return
        network = run_context.original_args().train_network
        gathered = getattr(network.optimizer, "gathered", None)
        moments = gathered(keep=self._rank == 0) if gathered else {}
        self._saved = step
        if self._rank != 0:
            return
        weights, rest = split_parameters(network, self._model())
        rest |= moments
        state = {
            **self._state,
            "step": step,
            "samples": step * self._state["global_batch_size"],
            "skipped_steps": self._watch.skipped,
        }
        self._outcome.checkpoint = checkpoints.save(self._root, step, weights, rest, state, self._keep)


# A process' part of shared-out moments is saved gathered, under the names of the whole ones.
NOT_SAVED = (TRANSIENT, COUNTER, "adam_m.bucket_", "adam_v.bucket_")


def split_parameters(network: Any, model: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """All parameters of the training step as numpy: the model's weights, and everything else by name.

    Left out is what each step sets anew (accumulators, the counter of dropout).
    """
    kept = [p for p in network.get_parameters() if not p.name.startswith(NOT_SAVED)]
    names = {p.name for p in model.get_parameters()}
    weights = {p.name: p.asnumpy() for p in kept if p.name in names}
    rest = {p.name: p.asnumpy() for p in kept if p.name not in names}
    return weights, rest


class BeforeTraining(Callback):
    """Do something once the network is there, before the first step."""

    def __init__(self, action: Callable[[], None]) -> None:
        super().__init__()
        self._action = action

    def on_train_begin(self, run_context: Any) -> None:
        self._action()


class DropoutByStep(Callback):
    """Draw dropout masks by the number of the step, so that a resumed run draws what an unbroken one would.

    Must run after the weights are checked, whose network has no counter yet.

    Args:
        start: steps done before this session.
        passes: forward passes in a step; the wrapper counts them up from this callback's number.
        kernels: the network's layers draw in our kernels, which take the number themselves.
    """

    def __init__(
        self, model: Callable[[], Any], start: int, seed: int, passes: int, kernels: bool = False
    ) -> None:
        super().__init__()
        self._model, self._start, self._seed, self._passes = model, start, seed, passes
        self._kernels, self._rank = kernels, 0
        self._counter: Any = None

    def on_train_begin(self, run_context: Any) -> None:
        from mindformers.tools.utils import get_real_rank

        self._rank = get_real_rank()
        self._counter = count_steps(self._model(), self._seed, self._rank)
        run_context.original_args().train_network.dropout_counter = self._counter

    def on_train_step_begin(self, run_context: Any) -> None:
        number = (self._start + run_context.original_args().cur_step_num) * self._passes
        if self._counter is not None:
            import mindspore as ms

            self._counter.set_data(ms.Tensor([number], ms.int32))
        if self._kernels:
            from mindferry.kernels import seed_step

            seed_step(self._seed, number, self._rank)


class RestoreOptimizer(Callback):
    """Put the optimizer's state back before the first step of a resumed run.

    Raises:
        MindferryError: the checkpoint lacks a state of this run, or has one of another shape.
    """

    def __init__(self, checkpoint: checkpoints.Checkpoint, model: Any) -> None:
        super().__init__()
        self._checkpoint, self._model = checkpoint, model

    def on_train_begin(self, run_context: Any) -> None:
        import mindspore as ms

        network = run_context.original_args().train_network
        saved = self._checkpoint.optimizer()
        names = {p.name for p in self._model().get_parameters()}
        for parameter in network.get_parameters():
            if parameter.name in names or parameter.name.startswith(NOT_SAVED):
                continue
            value = saved.get(parameter.name)
            if value is None or tuple(value.shape) != tuple(parameter.shape):
                found = "none" if value is None else f"shape {tuple(value.shape)}"
                raise self._unfit(parameter.name, f"found {found}, expected shape {tuple(parameter.shape)}")
            parameter.set_data(ms.Tensor(value, parameter.dtype))
        if hasattr(network.optimizer, "restore"):
            try:
                network.optimizer.restore(saved)
            except KeyError as err:
                raise self._unfit(err.args[0], "missing, or of another shape") from None

    def _unfit(self, name: str, what: str) -> MindferryError:
        return MindferryError(
            f"{self._checkpoint.path.name}: optimizer state {name}: {what}",
            remedy="the run's optimizer changed since; start over with --restart",
            id="checkpoint.optimizer",
        )
