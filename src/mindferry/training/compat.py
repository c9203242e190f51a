"""Where mindformers 1.9.0 needs help off Ascend, each with its reason. No class of mindformers is changed.

| what | why |
|---|---|
| PortableTrainOneStepCell | MFTrainOneStepCell asks NPUGetFloatStatusV2 for overflow; only Ascend has it |
| AccumulatingTrainOneStepCell | gradient_accumulation_steps is reset to 1 outside semi-automatic parallelism |
| TabledLR | schedules are computed in float32, and several of other frameworks have no class |
| FlooredLossScale | DynamicLossScaleUpdateCell falls to 1 at the least, whatever the source's floor |
| AdamWDecayAll | 1-D tensors and biases are never decayed, even where the source does it |
| OrderedMegatronLoader | the loader of Megatron files waits with Barrier, which has no CPU kernel; several
  processes read with numpy, in the same order |
| quiet() | mindformers opens log files in ./output and MindSpore prints to stderr while they are imported |
| affinity_cpu_list: [] | mindformers always binds MindSpore's threads to cores, meant for hosts of NPUs with
  many; on two cores it made a step 1.6 times slower (0.43 s against 0.26 s, a 4-layer GPT-2) |
| synchronous_pynative() | PyNative hands every operator through a chain of threads; with two cores, waiting for
  them was most of a step (0.7 to 3.5 s against 0.25 s, a 2-layer GPT-2), and errors come late |
| graph_kernel() | 1.9.0's build_context no longer passes `enable_graph_kernel` on to MindSpore |
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def quiet(log_dir: Path) -> None:
    """Point mindformers' log files to `log_dir`; must run before mindformers is first imported."""
    log_dir.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("LOG_MF_PATH", str(log_dir / "mindformers"))
    os.environ.setdefault("GLOG_v", "2")
    # The tokenizers library warns on every fork otherwise; nothing here tokenizes while training.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def graph_kernel(enabled: bool) -> None:
    """Switch MindSpore's graph-kernel fusion; it imports `decorator`, which MindSpore does not declare."""
    import mindspore as ms

    ms.set_context(enable_graph_kernel=enabled)


def synchronous_pynative() -> None:
    """Run PyNative operators where they are called; graph mode is not touched."""
    import mindspore as ms

    ms.set_context(pynative_synchronize=True)


# Wrappers of run.yaml -> the same step without Ascend's overflow register.
PORTABLE_WRAPPERS = {
    "MFTrainOneStepCell": "PortableTrainOneStepCell",
}

# MindSpore's own steps take one loss; GPTModel returns four, which only mindformers' step adds up. The maths is
# the same, so they are taken for it.
SAME_STEP = ("TrainOneStepCell", "TrainOneStepWithLossScaleCell")

# Wrappers that take micro_batches and per_token_loss.
ACCUMULATING_WRAPPERS = (
    "PortableTrainOneStepCell",
    "AccumulatingTrainOneStepCell",
    "KernelTrainOneStepCell",
)

# With layer_spec fused: wrapper and optimizer -> those on our kernels, and the optimizer's arguments.
KERNEL_WRAPPERS = {"PortableTrainOneStepCell": "KernelTrainOneStepCell"}
KERNEL_OPTIMIZERS = {
    "AdamW": {"type": "KernelAdamW"},
    "AdamWDecayAll": {"type": "KernelAdamW", "decay_all": True},
}


def kernel_step(content: dict[str, Any]) -> None:
    """Take the step on our kernels where layer_spec fused asks for it and they work; changes `content`.

    States and checkpoints are the same. The fused layers fall back to portable ones with a reason of their own;
    this needs the kernels alone, whatever the model is.
    """
    wrapper, optimizer = content["runner_wrapper"], content["optimizer"]
    config = content["model"]["model_config"]
    fused = config.get("layer_spec") == "fused" and config.get("param_init_type", "float32") == "float32"
    if not fused or wrapper["type"] not in KERNEL_WRAPPERS or optimizer["type"] not in KERNEL_OPTIMIZERS:
        return
    from mindferry import kernels

    if not kernels.state().usable:
        return
    import mindferry.training.kernel_step  # noqa: F401 - registers them

    wrapper["type"] = KERNEL_WRAPPERS[wrapper["type"]]
    optimizer.update(KERNEL_OPTIMIZERS[optimizer["type"]])
    optimizer.pop("use_fused", None)


def register_wrappers() -> None:
    """Register our step wrappers, learning rates and optimizers with mindformers (idempotent)."""
    import mindferry.training.megatron_loader
    import mindferry.training.monitors
    import mindferry.training.optimizers
    import mindferry.training.schedule
    import mindferry.training.wrappers  # noqa: F401
