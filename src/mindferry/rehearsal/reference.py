"""The same steps in one process: the network that `train` builds from run.yaml, in PyNative mode, fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mindferry.checking import sides
from mindferry.rehearsal.plan import Plan


@dataclass
class Reference:
    """What one process computed.

    Attributes:
        losses, grad_norms: of each step; the norm before clipping.
        gradients: of each step, name -> array.
        weights: after the last step.
        layers: of each stage, as mindformers' LayerSetting places them; None where it refuses.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, np.ndarray]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    layers: list[list[int]] | None = None


def overrides(plan: Plan) -> dict[str, Any]:
    """Dotted keys of run.yaml for the rehearsed sizes on one process."""
    spec = plan.spec
    model = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "seq_length": plan.seq_length,
        "offset": 0,
        "layer_spec": "portable",
        "fp32_residual_connection": False,
    }
    degrees = ("data_parallel", "model_parallel", "context_parallel", "pipeline_stage", "micro_batch_num")
    return {
        **sides.no_dropout(),
        **{f"model.model_config.{key}": value for key, value in model.items()},
        **{f"parallel_config.{key}": 1 for key in degrees},
        "parallel_config.use_seq_parallel": False,
        "parallel.parallel_mode": 0,
        "parallel.enable_parallel_optimizer": False,
        "use_parallel": False,
        "recompute_config.recompute": False,
        "recompute_config.select_recompute": False,
        "context.mode": 1,
        "context.device_target": "CPU",
        "context.enable_graph_kernel": False,
        "runner_config.sink_mode": False,
    }


def run(
    plan: Plan,
    weights: dict[str, np.ndarray],
    ids: np.ndarray,
    mask: np.ndarray,
    learning_rate: float,
    on_step: Callable[[], None] = lambda: None,
) -> Reference:
    """Train one process on what the ranks of the rehearsal share.

    Args:
        weights: whole parameters, by name.
        ids: [steps, micro-batches, sequences, seq_length + 1] int32; mask [..., seq_length] of 0 and 1.
    """
    from mindferry.training import engine

    content = engine.prepare(plan.run, engine.Options(overrides=overrides(plan)))
    config = engine.set_up(content, plan.run)
    network = sides.build_network(content, config)
    _load(network, weights)
    found = Reference()
    found.layers = placed_layers(network, plan)
    for step in range(len(ids)):
        loss, gradients = _step(network, ids[step], mask[step], plan.per_token)
        norm = float(np.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in gradients.values())))
        found.losses.append(loss)
        found.grad_norms.append(norm)
        found.gradients.append(gradients)
        rate = np.float32(learning_rate * min(1.0, plan.clip / (norm + 1e-6)))
        weights = {
            name: value - rate * gradients[name] if name in gradients else value
            for name, value in weights.items()
        }
        _load(network, weights)
        on_step()
    found.weights = weights
    return found


def _load(network: Any, weights: dict[str, np.ndarray]) -> None:
    import mindspore as ms

    for parameter in network.get_parameters():
        parameter.set_data(ms.Tensor(weights[parameter.name]))


def _step(
    network: Any, ids: np.ndarray, mask: np.ndarray, per_token: bool
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of a step: micro-batches alike, or by their unmasked tokens."""
    counts = mask.sum((1, 2), dtype=np.float64)
    shares = counts / counts.sum() if per_token else np.full(len(ids), 1.0 / len(ids))
    loss = 0.0
    gradients: dict[str, np.ndarray] = {}
    for number, share in enumerate(shares):
        one, found = _micro_batch(network, ids[number], mask[number])
        loss += share * one
        for name, value in found.items():
            part = value.astype(np.float64) * share
            gradients[name] = gradients[name] + part if name in gradients else part
    return loss, {name: value.astype(np.float32) for name, value in gradients.items()}


def _micro_batch(network: Any, ids: np.ndarray, mask: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    import mindspore as ms
    from mindspore import ops

    rows, length = mask.shape
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    inputs = [ms.Tensor(np.ascontiguousarray(value)) for value in (ids[:, :-1], ids[:, 1:], mask, positions)]
    network.set_train(True)

    def loss_of(ids: Any, labels: Any, mask: Any, positions: Any) -> Any:
        return network(input_ids=ids, labels=labels, loss_mask=mask, position_ids=positions)[0]

    parameters = network.trainable_params()
    loss, gradients = ops.value_and_grad(loss_of, None, parameters)(*inputs)
    found = {p.name: g.asnumpy() for p, g in zip(parameters, gradients, strict=True)}
    return float(loss.asnumpy().reshape(-1)[0]), found


def placed_layers(network: Any, plan: Plan) -> list[list[int]] | None:
    """Layers of each stage by mindformers' own LayerSetting; None where it refuses the offset."""
    import copy

    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting

    config = copy.copy(network.get_gpt_model().config)
    stages = plan.grid.pipeline_stage
    config.pipeline_model_parallel_size = stages
    try:
        setting = LayerSetting(plan.spec.num_layers, plan.offset, config, 1)
    except (ValueError, TypeError):
        return None
    return [
        [layer for layer in range(plan.spec.num_layers) if setting.pp_ids[layer] == stage]
        for stage in range(stages)
    ]
