"""The two sides of an alignment: the source in PyTorch, the target in MindSpore, on the same batch in fp32."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.targets.run_directory import RunDirectory
from mindferry.targets.run_yaml import ARCHITECTURES, COLUMNS, data_files
from mindferry.targets.schema import MEGATRON_LOADER


@dataclass(frozen=True)
class Batch:
    """Token ids and shifted labels [B, S] int32, mask [B, S] (1 = counts in the loss), positions [B, S]."""

    input_ids: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray


@dataclass
class Trace:
    """What one side computed: float32 arrays, batch first.

    Attributes:
        activations: name -> [B, S, H] in forward order ("embedding", "decoder.layers.0", ...).
        logits: [B, S, V].
        gradients: target parameter name -> gradient of the loss.
    """

    activations: dict[str, np.ndarray] = field(default_factory=dict)
    logits: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss: float = 0.0
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def first_batch(content: Mapping[str, Any], size: int) -> Batch:
    """The first `size` rows of the run's training data, in file order; with Megatron files, in that of training."""
    loader = content["train_dataset"]["data_loader"]
    if loader["type"] == MEGATRON_LOADER:
        return _first_samples(loader, size)
    from mindspore.dataset import MindDataset

    files = [str(path) for path in data_files(content)]
    rows = MindDataset(files, columns_list=list(COLUMNS), shuffle=False)
    rows = rows.take(size).batch(size, drop_remainder=False)
    for values in rows.create_tuple_iterator(num_epochs=1, output_numpy=True):
        return Batch(*(np.ascontiguousarray(value, dtype=np.int32) for value in values))
    raise UsageError("the run's data has no rows", remedy="migrate again")


def _first_samples(loader: Mapping[str, Any], size: int) -> Batch:
    from mindferry.data.blend import Blend, BlendedSamples

    samples = BlendedSamples(Blend.of(loader))
    tokens = np.stack([samples[k] for k in range(min(size, len(samples)))]).astype(np.int32)
    ids = np.ascontiguousarray(tokens[:, :-1])
    positions = np.tile(np.arange(ids.shape[1], dtype=np.int32), (len(ids), 1))
    return Batch(ids, np.ascontiguousarray(tokens[:, 1:]), np.ones_like(ids), positions)


def require_torch() -> None:
    """
    Raises:
        UsageError: PyTorch or transformers is not installed.
    """
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as err:
        raise UsageError(
            f"the source side needs {err.name}, which is not installed",
            remedy="install it: pip install 'mindferry[torch]'",
            id="torch.missing",
        ) from None


@dataclass(frozen=True)
class Runnable:
    """A Hugging Face model that PyTorch can run in place of the source.

    Attributes:
        source: its mindferry.sources.Source.
        frozen: parameters that only transformers' class has; they are zero and must stay so.
    """

    source: Any
    frozen: tuple[str, ...] = ()


def load_torch_model(runnable: Runnable) -> Any:
    """The source as a transformers model in fp32, dropout off. Code in the directory is never run."""
    require_torch()
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        str(runnable.source.path),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        attn_implementation="eager",
    )
    for name, parameter in model.named_parameters():
        if any(name == frozen or name.endswith(f".{frozen}") for frozen in runnable.frozen):
            parameter.requires_grad_(False)
    return model.eval()


def huggingface_form(source: Any, directory: Path) -> Runnable:
    """`source` as a Hugging Face model, for PyTorch to run: itself, or a conversion written below `directory`.

    nanoGPT, Megatron-LM and other checkpoints come without code that could be trusted to run them. They are
    converted by the same weight rules as the run, whose layouts are proven against independent references in
    the tests of the weights; what is compared here is everything after that.
    """
    if source.format == "huggingface":
        return Runnable(source)
    from mindferry.sources import open_source
    from mindferry.weights import exporting
    from mindferry.weights.rules import make_plan

    plan = make_plan(source.rules, source.tensors, source.key_of)
    migration = {
        "source": {"format": source.format, "family": source.family},
        "config": [vars(decision) for decision in source.decisions],
        "model": source.spec.model_dump(),
        "weights": {"used": [], "created": []},
    }
    layout = source.rules.geometry.layout

    class Converting(exporting.Trained):
        """Its parameters are made one by one while the Hugging Face files are written."""

        def store(self) -> Any:
            return _converted(source, plan)

    trained = Converting(directory, source.path, 0, source.spec, layout, migration)
    report = exporting.export(trained, "hf", directory / "hf", dtype="float32")
    opened = open_source(directory / "hf")
    made_up = {*report.created, *(step.target for step in plan.created)}
    frozen = [name for step in opened.rules.steps if step.target in made_up for name in step.sources]
    return Runnable(opened, tuple(frozen))


def _converted(source: Any, plan: Any) -> Any:
    """A store of the target's parameters, each made from the source's tensors when it is read."""
    from mindferry.weights.tensor_store import MemoryStore

    def entry(step: Any) -> tuple[Any, Any, Any]:
        if not step.sources:
            fill = 1.0 if step.rule.if_absent == "ones" else 0.0
            return (
                step.target_shape,
                np.dtype(np.float32),
                lambda: np.full(step.target_shape, fill, np.float32),
            )
        tensors = source.tensors
        dtype = tensors.dtype(step.sources[0])
        return (
            step.target_shape,
            dtype,
            lambda: step.chain.forward([tensors.read(n) for n in step.sources])[0],
        )

    return MemoryStore({step.target: entry(step) for step in plan.steps}, source.path)


@dataclass(frozen=True)
class Opened:
    """The source of a run, and what PyTorch runs of it."""

    source: Any
    runnable: Runnable


@contextmanager
def opened(run: RunDirectory, source_path: Path, known: Opened | None = None) -> Iterator[Opened]:
    """The source at `source_path` with what was assumed for the run; converted for PyTorch at most once.

    Args:
        known: opened before, to be used again.
    """
    if known is not None:
        yield known
        return
    from mindferry.sources import open_source

    source = open_source(source_path, assume=assumptions(run))
    with tempfile.TemporaryDirectory(prefix="mindferry-source-") as scratch:
        yield Opened(source, huggingface_form(source, Path(scratch)))


def torch_loss(logits: Any, batch: Batch) -> Any:
    """Mean cross-entropy over the unmasked tokens, in fp32."""
    import torch

    labels = torch.from_numpy(batch.labels.astype(np.int64)).reshape(-1)
    mask = torch.from_numpy(batch.loss_mask.astype(np.float32)).reshape(-1)
    losses = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels, reduction="none")
    return (losses * mask).sum() / mask.sum()


# Where transformers' decoders keep their layers and their final norm; the first pair that exists is taken.
TORCH_DECODERS = (
    ("transformer.h", "transformer.ln_f"),
    ("model.layers", "model.norm"),
    ("gpt_neox.layers", "gpt_neox.final_layer_norm"),
    ("model.decoder.layers", "model.decoder.final_layer_norm"),
)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _hook_torch(model: Any, trace: Trace) -> list[Any]:
    """Record what enters the first layer ("embedding"), what leaves each, and the final norm."""
    modules = dict(model.named_modules())
    layers, norm = next(pair for pair in TORCH_DECODERS if all(path in modules for path in pair))

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            trace.activations[name] = _first(output).detach().numpy().copy()

        return hook

    def keep_input(_module: Any, inputs: Any, named: Any) -> None:
        entering = inputs[0] if inputs else named["hidden_states"]
        trace.activations["embedding"] = entering.detach().numpy().copy()

    hooks = [modules[f"{layers}.0"].register_forward_pre_hook(keep_input, with_kwargs=True)]
    for number, layer in enumerate(modules[layers]):
        hooks.append(layer.register_forward_hook(keep(f"decoder.layers.{number}")))
    hooks.append(modules[norm].register_forward_hook(keep("decoder.final_layernorm")))
    return hooks


def run_torch(model: Any, source: Any, batch: Batch) -> Trace:
    """Forward and backward of the source; gradients come back under the target's names."""
    import torch

    trace = Trace()
    hooks = _hook_torch(model, trace)
    ids = torch.from_numpy(batch.input_ids.astype(np.int64))
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    loss = torch_loss(logits, batch)
    model.zero_grad(set_to_none=True)
    loss.backward()
    trace.logits = logits.detach().numpy().copy()
    trace.loss = float(loss)
    trace.gradients = map_to_target(source, torch_arrays(model, source, lambda p: p.grad))
    return trace


def torch_arrays(model: Any, source: Any, pick: Any) -> dict[str, np.ndarray]:
    """pick(parameter) of every parameter, as numpy, by the names that the weight rules use."""
    wanted = source.rules.source_shapes()
    arrays = {}
    for name, parameter in model.named_parameters():
        value = pick(parameter)
        # The rules leave out the wrappers in front: "transformer.", "model.decoder.", ...
        while name not in wanted and "." in name:
            name = name.partition(".")[2]
        if value is not None and name in wanted:
            arrays[name] = value.detach().numpy()
    return arrays


def map_to_target(source: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays shaped like the source's tensors, moved by the weight rules to the target's names and layouts."""
    moved = {}
    for step in source.rules.steps:
        if step.sources and all(name in arrays for name in step.sources):
            moved[step.target] = step.chain.forward([arrays[name] for name in step.sources])[0]
    return moved


def build_network(content: Mapping[str, Any], config: Any) -> Any:
    """The run's network, made by mindformers from its registry."""
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.build_model import build_network as build

    build_parallel_config(config)
    return build(
        config.model,
        default_args={
            "parallel_config": config.parallel_config,
            "moe_config": config.moe_config,
            "dataset_config": config.train_dataset,
            "batch_size": content["runner_config"]["batch_size"],
        },
    )


def load_weights(network: Any, model_dir: Path) -> None:
    """Fill every parameter of `network` from safetensors.

    Raises:
        MindferryError: a parameter is missing, surplus or of another shape; nothing is loaded then.
    """
    import mindspore as ms

    from mindferry.training.weights_check import check_weights, open_model

    check_weights(model_dir, network)
    store = open_model(model_dir)
    for parameter in network.get_parameters():
        value = np.array(store.read(parameter.name), dtype=np.float32)
        parameter.set_data(ms.Tensor(value, parameter.dtype))


def _batch_first(tensor: Any) -> np.ndarray:
    return np.ascontiguousarray(tensor.asnumpy().transpose(1, 0, 2))


def _hook_mindspore(model: Any, trace: Trace) -> list[Any]:
    """The same points as on the source's side: what enters the first layer, what leaves each, the final norm."""
    points = {f"decoder.layers.{i}": layer for i, layer in enumerate(model.decoder.layers)}
    points["decoder.final_layernorm"] = model.decoder.final_layernorm

    def keep_input(_cell: Any, inputs: Any) -> None:
        trace.activations["embedding"] = _batch_first(_first(inputs))

    hooks = [points["decoder.layers.0"].register_forward_pre_hook(keep_input)]
    for name, cell in points.items():

        def keep(_cell: Any, _inputs: Any, output: Any, name: str = name) -> None:
            trace.activations[name] = _batch_first(_first(output))

        hooks.append(cell.register_forward_hook(keep))
    return hooks


def run_mindspore(network: Any, batch: Batch) -> Trace:
    """Forward and backward of the target in PyNative mode."""
    import mindspore as ms
    from mindspore import ops

    trace = Trace()
    ids, labels, mask, positions = (
        ms.Tensor(value) for value in (batch.input_ids, batch.labels, batch.loss_mask, batch.position_ids)
    )
    network.set_train(False)
    hooks = _hook_mindspore(network.get_gpt_model(), trace)
    logits = network(input_ids=ids, position_ids=positions)
    for hook in hooks:
        hook.remove()
    trace.logits = logits.asnumpy().reshape(*batch.input_ids.shape, -1)
    network.set_train(True)

    def loss_of(ids: Any, labels: Any, mask: Any, positions: Any) -> Any:
        return network(input_ids=ids, labels=labels, loss_mask=mask, position_ids=positions)[0]

    parameters = network.trainable_params()
    loss, gradients = ops.value_and_grad(loss_of, None, parameters)(ids, labels, mask, positions)
    trace.loss = float(loss.asnumpy().reshape(-1)[0])
    trace.gradients = {p.name: g.asnumpy() for p, g in zip(parameters, gradients, strict=True)}
    return trace


def no_dropout() -> dict[str, Any]:
    """Overrides for a run.yaml that make a comparison possible: fp32 everywhere, dropout off."""
    base = "model.model_config."
    values: dict[str, Any] = {f"{base}{name}_dropout": 0.0 for name in ("embedding", "hidden", "attention")}
    for key in ("compute_dtype", "layernorm_compute_type", "softmax_compute_type", "param_init_type"):
        values[base + key] = "float32"
    return values


def assumptions(run: RunDirectory) -> dict[str, Any]:
    """What the person told `migrate` about the source (--assume)."""
    try:
        migration = json.loads(run.migration.read_text(encoding="utf-8"))
        return dict(migration["source"].get("assume") or {})
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_pair(source: Any, content: Mapping[str, Any], run: RunDirectory) -> None:
    """The run and the source are the same kind of model.

    Raises:
        MindferryError: family or vocabulary differ, so no comparison makes sense.
    """
    config = content["model"]["model_config"]
    model_type = ARCHITECTURES[source.spec.family][2]
    for key, wanted in (("model_type", model_type), ("vocab_size", source.spec.vocab_size)):
        if config.get(key) != wanted:
            raise MindferryError(
                f"{run.yaml}: {key}: found {config.get(key)!r}, the source has {wanted!r}",
                remedy="is --against the source this run was migrated from?",
                id="verify.pair",
            )
