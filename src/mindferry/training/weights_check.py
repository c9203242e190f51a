"""Weights on disk against the network that is to take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError
from mindferry.weights.tensor_store import SafetensorsStore

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def open_model(model_dir: Path) -> SafetensorsStore:
    """The weights at `model_dir`, in one file or in shards."""
    if (model_dir / INDEX).exists():
        return SafetensorsStore.open_index(model_dir / INDEX)
    return SafetensorsStore([model_dir / SINGLE])


def check_weights(model_dir: Path, network: Any) -> None:
    """The files at `model_dir` hold exactly the network's parameters, in their shapes.

    mindformers only logs what it could not load and trains on from random values.

    Raises:
        MindferryError: missing, surplus or mis-shaped parameters.
    """
    store = open_model(model_dir)
    wanted = {p.name: tuple(p.shape) for p in network.get_parameters()}
    found = {name: tuple(store.shape(name)) for name in store.names()}
    problems = [f"missing {name}" for name in wanted.keys() - found.keys()]
    problems += [f"surplus {name}" for name in found.keys() - wanted.keys()]
    problems += [
        f"{name}: found shape {found[name]}, expected {wanted[name]}"
        for name in wanted.keys() & found.keys()
        if wanted[name] != found[name]
    ]
    if problems:
        raise MindferryError(
            f"{model_dir}: weights do not fit run.yaml's model ({len(problems)} problems): "
            + "; ".join(sorted(problems)[:5]),
            remedy="run.yaml's model_config was changed after the migration; migrate again or undo the change",
            id="weights.mismatch",
        )


def load_weights(model_dir: Path, network: Any) -> None:
    """Put the weights at `model_dir` into `network`; run check_weights first.

    For processes of data parallelism: mindformers loads whole weights there only by cutting them after a strategy
    file, which MindSpore writes in automatic parallelism only.
    """
    import mindspore as ms

    for path in sorted(model_dir.glob("*.safetensors")):
        ms.load_param_into_net(network, ms.load_checkpoint(str(path), format="safetensors"))
