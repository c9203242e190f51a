"""The training YAML of GPT-2 in mindformers 1.3.2, the last release that has a GPT-2.

Keys and classes were read in its wheel: models/gpt2/gpt2_config.py, configs/gpt2/pretrain_gpt2_small_fp16.yaml,
core/lr/lr_schedule.py, core/optim/adamw.py, wrapper/wrapper.py.
"""

from __future__ import annotations

from typing import Any

from mindferry.errors import UsageError
from mindferry.spec import LossScale, ModelSpec, Recipe
from mindferry.targets import run_yaml

TARGET = "mindformers-1.3.2"
YAML = "gpt2.yaml"
WEIGHTS = "gpt2.ckpt"
COLUMNS = ("input_ids", "attention_mask")

# Its activation words; "gelu" is the tanh form there. It has no word for the exact GELU.
ACTIVATIONS = {"gelu_tanh": "gelu", "relu": "relu", "silu": "silu"}
# What float16 needs and a float32 recipe does not state.
FLOAT16_SCALE = LossScale(dynamic=True, value=65536.0)

_HEADER = """\
# Training run for mindformers 1.3.2 (MindSpore 2.4.10), written by mindferry. Start it in this directory.
# What was decided on the way here, and why: migration.json
"""


def check_ratio(spec: ModelSpec) -> None:
    """Refuse an MLP that expand_ratio cannot state.

    Raises:
        UsageError: ffn_hidden_size is no multiple of hidden_size.
    """
    if spec.ffn_hidden_size % spec.hidden_size:
        raise UsageError(
            f"mindformers 1.3.2 cannot hold ffn_hidden_size {spec.ffn_hidden_size}: its expand_ratio is a whole "
            f"number of hidden_size {spec.hidden_size}",
            remedy="stay with the current mindformers",
            id="export.family",
        )


def model_block(spec: ModelSpec, seq_length: int) -> dict[str, Any]:
    """The `model` section. `compute_dtype` is written as what it computes in: float16, whatever it says."""
    check_ratio(spec)
    config: dict[str, Any] = {
        "type": "GPT2Config",
        "seq_length": seq_length,
        "max_position_embeddings": spec.max_position_embeddings,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_attention_heads,
        "expand_ratio": spec.ffn_hidden_size // spec.hidden_size,
        "hidden_act": ACTIVATIONS[spec.activation],
        "embedding_dropout_prob": spec.embedding_dropout,
        "hidden_dropout_rate": spec.hidden_dropout,
        "attention_dropout_rate": spec.attention_dropout,
        "layernorm_compute_type": "float32",
        "softmax_compute_type": "float32",
        "param_init_type": "float32",
        "compute_dtype": "float16",
        "use_flash_attention": False,
        "use_past": False,
        "checkpoint_name_or_path": "",
    }
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(spec, name) is not None:
            config[name] = getattr(spec, name)
    return {"model_config": config, "arch": {"type": "GPT2LMHeadModel"}}


def check_recipe(recipe: Recipe) -> list[str]:
    """What of `recipe` 1.3.2 does otherwise, as warnings.

    Raises:
        UsageError: a schedule it has no class for, or decay of every tensor.
    """
    block = run_yaml.lr_schedule_block(recipe.schedule)
    if block["type"] == run_yaml.TABLED:
        raise UsageError(
            f"mindformers 1.3.2 has no schedule {recipe.schedule.kind!r} with this warm-up or end",
            remedy="choose another schedule, or stay with the current mindformers",
            id="legacy.schedule",
        )
    if recipe.optimizer.decay == "all" and recipe.optimizer.weight_decay:
        raise UsageError(
            "mindformers 1.3.2 never decays 1-D tensors and biases, and the recipe decays every tensor",
            remedy="stay with the current mindformers, or set the decay to 0",
            id="legacy.decay",
        )
    notes = []
    if recipe.precision.compute != "float16":
        notes.append(f"the recipe asks for {recipe.precision.compute}, which compute_dtype cannot give there")
        if not recipe.loss_scale.dynamic:
            notes.append(f"float16 needs a loss scale: dynamic from {FLOAT16_SCALE.value:.0f} was written")
    if recipe.per_token_loss and recipe.gradient_accumulation_steps > 1:
        notes.append("mindformers 1.3.2 averages micro-batches, the recipe averages tokens")
    return notes


def build(
    spec: ModelSpec, recipe: Recipe, *, steps_per_epoch: int, recompute: dict[str, Any]
) -> dict[str, Any]:
    """The content of the YAML as plain data, in the order of the shipped ones."""
    dynamic = recipe.loss_scale.dynamic or recipe.precision.compute == "float16"
    scale = recipe.loss_scale if dynamic else FLOAT16_SCALE
    dataset = {
        "data_loader": {"type": "MindDataset", "dataset_dir": "./data/train.mindrecord", "shuffle": True},
        "input_columns": list(COLUMNS),
        "num_parallel_workers": 1,
        "python_multiprocessing": False,
        "drop_remainder": True,
        "batch_size": recipe.batch_size,
        "repeat": 1,
        "numa_enable": False,
        "prefetch_size": 1,
        "seed": recipe.seed,
    }
    clip = recipe.max_grad_norm if recipe.max_grad_norm is not None else run_yaml.NO_CLIPPING
    return {
        "seed": recipe.seed,
        "run_mode": "train",
        "output_dir": "./output",
        "load_checkpoint": f"./{WEIGHTS}",
        "auto_trans_ckpt": False,
        "resume_training": False,
        "context": {"mode": 0, "device_target": "Ascend", "device_id": 0},
        "runner_config": {
            "epochs": -(-recipe.schedule.total_steps // max(steps_per_epoch, 1)),
            "batch_size": recipe.batch_size,
            "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
            "sink_mode": True,
            "sink_size": 2,
        },
        "runner_wrapper": {
            "type": "MFTrainOneStepCell",
            "scale_sense": run_yaml.scale_sense(scale),
            "use_clip_grad": True,
            "max_grad_norm": clip,
        },
        "use_parallel": False,
        "parallel": {"parallel_mode": 0, "gradients_mean": True, "enable_parallel_optimizer": False},
        "parallel_config": {
            "data_parallel": 1,
            "model_parallel": 1,
            "pipeline_stage": 1,
            "micro_batch_num": 1,
            "vocab_emb_dp": True,
            "gradient_aggregation_group": 4,
        },
        "micro_batch_interleave_num": 1,
        "recompute_config": {
            "recompute": recompute["recompute"],
            "select_recompute": recompute["select_recompute"],
            "parallel_optimizer_comm_recompute": False,
            "mp_comm_recompute": True,
            "recompute_slice_activation": False,
        },
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "gpt2"},
        "do_eval": False,
        "train_dataset": dataset,
        "train_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": dataset},
        "model": model_block(spec, recipe.seq_length),
        "lr_schedule": run_yaml.lr_schedule_block(recipe.schedule),
        "optimizer": {
            "type": "AdamW",
            "betas": list(recipe.optimizer.betas),
            "eps": recipe.optimizer.eps,
            "weight_decay": recipe.optimizer.weight_decay,
        },
        "callbacks": [
            {"type": "MFLossMonitor"},
            {
                "type": "CheckpointMonitor",
                "prefix": "gpt2",
                "save_checkpoint_steps": max(1, min(1000, recipe.schedule.total_steps)),
                "keep_checkpoint_max": 2,
                "integrated_save": True,
                "async_save": False,
            },
        ],
        "processor": {
            "return_tensors": "ms",
            "tokenizer": {"type": "GPT2Tokenizer"},
            "type": "GPT2Processor",
        },
    }


def dump(content: dict[str, Any]) -> str:
    """YAML text; the dataset is written twice, as both sections name it."""
    import io

    from ruamel.yaml import YAML

    yaml = YAML(typ="rt")
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.representer.ignore_aliases = lambda data: True
    yaml.representer.add_representer(
        float,
        lambda representer, value: representer.represent_scalar(
            "tag:yaml.org,2002:float", run_yaml.float_text(value)
        ),
    )
    stream = io.StringIO()
    yaml.dump(content, stream)
    return _HEADER + stream.getvalue()
