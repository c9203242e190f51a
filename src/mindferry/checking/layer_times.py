"""Each part of a model as a compiled piece of its own: what it takes forward and backward, with its real inputs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MAX_LAYERS = 16
# Part -> cells of a GPTModel that may compute it; which of them does is seen in a forward pass.
PLACES = {"embedding": ("embedding", "train_embedding"), "head": ("output_layer", "head"), "loss": ("loss",)}


@dataclass
class Call:
    """How the model called one of its cells: its arguments in the order of `construct`, and what came back."""

    cell: Any
    arguments: list[Any]
    output: Any


def parts_of(model: Any) -> dict[str, Any]:
    """Name -> cell, in forward order: embedding, layers (at most MAX_LAYERS, evenly chosen), final norm, head, loss."""
    import numpy as np

    layers = list(model.decoder.layers)
    chosen = sorted({int(i) for i in np.linspace(0, len(layers) - 1, min(MAX_LAYERS, len(layers)))})
    found: dict[str, Any] = {}
    for name in PLACES["embedding"]:
        found.setdefault(f"embedding:{name}", getattr(model, name, None))
    found |= {f"decoder.layers.{i}": layers[i] for i in chosen}
    found["decoder.final_layernorm"] = model.decoder.final_layernorm
    for part in ("head", "loss"):
        for name in PLACES[part]:
            found[f"{part}:{name}"] = getattr(model, name, None)
    return {name: cell for name, cell in found.items() if cell is not None}


@contextmanager
def _listening(cells: dict[str, Any], heard: dict[str, Call]) -> Iterator[None]:
    """Note how each cell is called; works where construct is run by Python, in PyNative mode."""

    def listen(name: str, cell: Any) -> Callable[..., Any]:
        construct = type(cell).construct

        def instead(*args: Any, **kwargs: Any) -> Any:
            bound = inspect.signature(construct).bind(cell, *args, **kwargs)
            bound.apply_defaults()
            output = construct(cell, *args, **kwargs)
            heard[name.partition(":")[0]] = Call(cell, list(bound.args)[1:], output)
            return output

        return instead

    for name, cell in cells.items():
        cell.__dict__["construct"] = listen(name, cell)
    try:
        yield
    finally:
        for cell in cells.values():
            del cell.__dict__["construct"]


def calls_of(network: Any, inputs: tuple[Any, ...], mode: int) -> dict[str, Call]:
    """Part -> its call in one PyNative forward pass; `mode` is set again afterwards.

    Args:
        inputs: token ids, labels, loss mask, positions, each a device tensor [B, S].
    """
    import mindspore as ms

    heard: dict[str, Call] = {}
    names = ("input_ids", "labels", "loss_mask", "position_ids")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        with _listening(parts_of(network.get_gpt_model()), heard):
            network(**dict(zip(names, inputs, strict=True)))
    finally:
        ms.set_context(mode=mode)
    return heard


def piece(call: Call) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward with backward) of a part, as calls without arguments.

    What flows through the model is an input; masks, tables and labels are constants of the piece.
    """
    import mindspore as ms
    from mindspore import ParameterTuple, nn, ops

    floats = (ms.float32, ms.float16, ms.bfloat16)
    tensors = [
        i
        for i, a in enumerate(call.arguments)
        if isinstance(a, ms.Tensor) and not isinstance(a, ms.Parameter)
    ]
    at = next((i for i in tensors if call.arguments[i].dtype in floats), tensors[0])
    flows = call.arguments[at].dtype in floats
    passed = [a for a in call.arguments if isinstance(a, ms.Parameter)]
    weights = {id(p): p for p in (*call.cell.trainable_params(), *passed)}
    first_only = isinstance(call.output, tuple)

    class Forward(nn.Cell):
        """The part, of its flowing input alone."""

        def __init__(self):
            super().__init__(auto_prefix=False)
            self.part = call.cell
            self.before = tuple(call.arguments[:at])
            self.after = tuple(call.arguments[at + 1 :])

        def construct(self, x):
            output = self.part(*self.before, x, *self.after)
            if first_only:
                return output[0]
            return output

    class Backward(nn.Cell):
        """Gradients of the input and of the part's parameters."""

        def __init__(self, forward):
            super().__init__(auto_prefix=False)
            self.forward = forward
            self.weights = ParameterTuple(weights.values())
            self.grad = ops.GradOperation(get_all=flows, get_by_list=bool(weights), sens_param=True)

        def construct(self, x, sens):
            if len(self.weights) > 0:
                return self.grad(self.forward, self.weights)(x, sens)
            return self.grad(self.forward)(x, sens)

    x = call.arguments[at]
    forward = Forward()
    backward = Backward(forward)
    output = call.output[0] if first_only else call.output
    sens = ops.ones_like(output)
    return lambda: forward(x).asnumpy(), lambda: _settle(backward(x, sens))


def _settle(value: Any) -> Any:
    """Wait until a result, however nested, is there."""
    while isinstance(value, (tuple, list)):
        value = value[-1]
    return value.asnumpy()


def pieces(network: Any, inputs: tuple[Any, ...], mode: int) -> dict[str, Callable[[], Any]]:
    """ "PART/forward" and "PART/both" -> a call that runs it, compiled and warm."""
    found: dict[str, Callable[[], Any]] = {}
    for name, call in calls_of(network, inputs, mode).items():
        found[f"{name}/forward"], found[f"{name}/both"] = piece(call)
    for run in found.values():
        run()
        run()
    return found


def time_all(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call, one after the other."""
    took = {}
    for name, run in calls.items():
        start = time.perf_counter()
        run()
        took[name] = time.perf_counter() - start
    return took
