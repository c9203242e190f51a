"""The script of one rank of a rehearsal; msrun starts it (see rehearsal.session)."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any


def work(folder: Path, request: dict[str, Any], rank: int) -> dict[str, Any]:
    """Rehearse each case of the request as rank `rank`; returns {"cases": what each measured}."""
    import mindspore as ms
    from mindspore.communication import init

    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE, pynative_synchronize=True)
    init()
    return {"cases": [_rehearse(Path(case["folder"]), case, rank) for case in request["cases"]]}


def _rehearse(folder: Path, case: dict[str, Any], rank: int) -> dict[str, Any]:
    from mindferry.rehearsal.topology import Topology
    from mindferry.rehearsal.wire import Wire

    topology = Topology(**{name: tuple(map(tuple, groups)) for name, groups in case["topology"].items()})
    every = [case["topology"][kind] for kind in ("tensor", "data", "pipeline")]
    lines = topology.pipeline
    pairs = [pair for line in lines for pair in itertools.pairwise(line)]
    ends = [(line[0], line[-1]) for line in lines if len(line) > 1]
    wire = Wire(rank, topology.of_rank(rank), [*every[0], *every[1], *pairs, *ends])
    stage, replica, _ = topology.position(rank)
    met = _meet(wire)
    began = time.perf_counter()
    trainer = Rank(folder, case, wire, stage, replica)
    steps = [trainer.step(number) for number in range(case["steps"])]
    trainer.save_weights()
    return {
        "met": met,
        "losses": [loss for loss, _ in steps],
        "grad_norms": [norm for _, norm in steps],
        "parameters": sum(value.size for value in trainer.share.weights.values()),
        "seen": trainer.stage.probe.seen,
        "in_flight": trainer.in_flight,
        "bytes": dict(wire.bytes),
        "calls": dict(wire.calls),
        "seconds": time.perf_counter() - began,
        "digest": trainer.digest(),
    }


def _meet(wire: Any) -> dict[str, list[int]]:
    """Who really answers in each group, in the order of the ranks."""
    import numpy as np

    met = {}
    for name in ("world", "tensor", "data", "previous", "next", "tied"):
        if name in wire.groups and wire.size(name) > 1:
            present = np.zeros(wire.size("world"), np.float32)
            present[wire.rank] = 1.0
            met[name] = np.flatnonzero(wire.sum(name, present)).tolist()
    wire.bytes.clear()
    wire.calls.clear()
    return met


class Rank:
    """One rank through the steps of a case.

    Attributes:
        in_flight: the most micro-batches whose activations were held at once.
    """

    def __init__(self, folder: Path, case: dict[str, Any], wire: Any, stage: int, replica: int) -> None:
        import numpy as np
        from safetensors.numpy import load_file

        from mindferry.rehearsal.cells import Share
        from mindferry.rehearsal.stage import Cutting, Stage
        from mindferry.spec import ModelSpec
        from mindferry.weights.transforms import TargetLayout

        self.folder, self.case, self.wire, self.number, self.replica = folder, case, wire, stage, replica
        self.stages = len(case["topology"]["pipeline"][0])
        self.cutting = Cutting(
            ModelSpec(**case["spec"]), TargetLayout(**case["packing"]), case["sequence"], case["seq_length"]
        )
        weights = load_file(case["start"][wire.rank])
        self.share = Share(
            {name: np.array(value) for name, value in weights.items()}, frozenset(case["frozen"])
        )
        self.stage = Stage(
            self.share, wire, self.cutting, case["layers"][stage], stage == 0, stage == self.stages - 1
        )
        self.tokens = np.load(folder / "tokens.npz")
        self.in_flight = 0
        self.first_step = True

    def step(self, number: int) -> tuple[float, float]:
        """One step of stochastic gradient descent; loss of the whole batch, norm of its gradient before clipping."""
        import numpy as np
        from safetensors.numpy import save_file

        from mindferry.rehearsal.stage import micro_batches

        self.share.gradients.clear()
        batches = micro_batches(
            self.tokens["ids"][number],
            self.tokens["mask"][number],
            self.case["per_token"],
            self.replica,
            self.wire.size("data"),
        )
        self.first_step = number == 0
        loss = self._pipeline(batches)
        self._reduce()
        gradients = self.share.gradients
        if self.wire.rank in self.case["writes_gradients"]:
            save_file(
                {name: np.ascontiguousarray(value) for name, value in gradients.items()},
                self.folder / f"gradients-{number}.rank-{self.wire.rank}.safetensors",
            )
        squares = sum(
            float(np.square(value, dtype=np.float64).sum())
            for name, value in gradients.items()
            if self._counts(name)
        )
        # The loss is known on the last stage, once for each share; its replicas have a part each.
        loss = loss / self.wire.size("tensor")
        total, squares = self.wire.sum("world", np.asarray([loss, squares], np.float32)).tolist()
        norm = squares**0.5
        rate = self.case["learning_rate"] * min(1.0, self.case["clip"] / (norm + 1e-6))
        for name, gradient in gradients.items():
            self.share.weights[name] -= np.float32(rate) * gradient
        return total, norm

    def _pipeline(self, batches: list[Any]) -> float:
        """Run this stage's schedule; the loss where it is the last stage, else 0."""
        from mindferry.rehearsal import schedule

        held: dict[int, Any] = {}
        inputs: dict[int, Any] = {}
        outputs: dict[int, Any] = {}
        gradients: dict[int, Any] = {}
        returned: dict[int, Any] = {}
        loss = 0.0
        shape = self._activation_shape(batches[0])
        for action, m in schedule.actions(self.number, self.stages, len(batches)):
            if action == schedule.RECEIVE:
                inputs[m] = self.wire.receive("previous", shape)
            elif action == schedule.FORWARD:
                self.stage.probe.open = self.first_step and m == 0
                outputs[m], held[m] = self.stage.forward(inputs.pop(m, None), batches[m])
                self.in_flight = max(self.in_flight, len(held))
                if self.stage.last:
                    loss += float(outputs.pop(m))
            elif action == schedule.SEND:
                self.wire.send("next", outputs.pop(m))
            elif action == schedule.RETURN:
                gradients[m] = self.wire.receive("next", shape)
            elif action == schedule.BACKWARD:
                returned[m] = self.stage.backward(gradients.pop(m, None), held.pop(m))
            else:
                self.wire.send("previous", returned.pop(m))
        return loss

    def _activation_shape(self, batch: Any) -> tuple[int, int, int]:
        rows, length = batch.input_ids.shape
        if self.cutting.sequence:
            length //= self.wire.size("tensor")
        return length, rows, self.cutting.spec.hidden_size

    def _reduce(self) -> None:
        """Complete the gradients: parts of the tensor group, both ends of a tied table, the mean over replicas."""
        import numpy as np

        from mindferry.rehearsal.stage import WORDS

        share = self.share
        for name in sorted(share.partial & share.gradients.keys()):
            share.gradients[name] = self.wire.sum("tensor", share.gradients[name])
        if self.cutting.spec.tie_word_embeddings and "tied" in self.wire.groups:
            share.gradients[WORDS] = self.wire.sum("tied", share.gradients[WORDS])
        names = sorted(share.gradients)
        flat = self.wire.sum("data", np.concatenate([share.gradients[name].reshape(-1) for name in names]))
        begin = 0
        for name in names:
            size = share.gradients[name].size
            share.gradients[name] = flat[begin : begin + size].reshape(share.gradients[name].shape)
            begin += size

    def _counts(self, name: str) -> bool:
        """Whether this rank's copy is the one that the gradient norm counts."""
        from mindferry.rehearsal.stage import WORDS

        if self.replica:
            return False
        if name == WORDS and self.number and self.cutting.spec.tie_word_embeddings:
            return False
        return name in self.case["cut"] or self.wire.index("tensor") == 0

    def save_weights(self) -> None:
        """This rank's file of a checkpoint."""
        import numpy as np
        from safetensors.numpy import save_file

        file = Path(self.case["end"][self.wire.rank])
        file.parent.mkdir(parents=True)
        save_file({name: np.ascontiguousarray(value) for name, value in self.share.weights.items()}, file)

    def digest(self) -> str:
        """Of the weights: replicas must have the same."""
        import hashlib

        found = hashlib.sha256()
        for name in sorted(self.share.weights):
            found.update(name.encode() + self.share.weights[name].tobytes())
        return found.hexdigest()


if __name__ == "__main__":
    from mindferry.launching.rank import main

    main(work)
