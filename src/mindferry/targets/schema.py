"""The closed schema of run.yaml: which keys each section knows, with their types.

mindformers raises on unknown keys in some sections and ignores them in others; here every unknown key is an
error. Names and defaults are those of mindformers 1.9.0 (`tools/register/template.py`).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, model_validator

Number = float


class Section(BaseModel):
    """A YAML section: unknown keys are refused, and a yes/no is never taken for a number."""

    model_config = ConfigDict(extra="forbid")


class Trainer(Section):
    type: StrictStr = "CausalLanguageModelingTrainer"
    model_name: StrictStr = "gpt2"


class RunnerConfig(Section):
    epochs: StrictInt = Field(gt=0)
    batch_size: StrictInt = Field(gt=0)
    sink_mode: StrictBool = False
    sink_size: StrictInt = 1
    gradient_accumulation_steps: StrictInt = Field(1, gt=0)
    stop_step: StrictInt = 0
    num_classes: StrictInt = 1


class ScaleSense(Section):
    type: StrictStr
    loss_scale_value: Number = Field(gt=0)
    scale_factor: Number = Field(2, gt=1)
    scale_window: StrictInt = Field(1000, gt=0)
    scale_floor: Number = Field(1.0, gt=0)


class RunnerWrapper(Section):
    type: StrictStr = "MFTrainOneStepCell"
    use_clip_grad: StrictBool = True
    max_grad_norm: Number = Field(1.0, gt=0)
    scale_sense: Number | ScaleSense = 1.0
    sens: Number | None = Field(None, gt=0)  # nn.TrainOneStepCell's name for a static scale
    local_norm: StrictBool = False
    calculate_per_token_loss: StrictBool = False
    # AccumulatingTrainOneStepCell's own
    gradient_wire_dtype: Literal["float32", "float16"] = "float32"
    reduce_every_micro_batch: StrictBool = False


class FusionSize(Section):
    mode: Literal["auto", "size"] = "auto"
    config: Number | None = Field(None, gt=0)  # MiB


class CommFusion(Section):
    allreduce: FusionSize = FusionSize()


class Optimizer(Section):
    type: StrictStr = "AdamW"
    betas: list[Number] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    eps: Number = Field(1e-8, gt=0)
    weight_decay: Number = Field(0.0, ge=0)
    learning_rate: Number | None = None
    use_fused: StrictBool = False


class LrSchedule(Section):
    type: StrictStr
    learning_rate: Number = Field(gt=0)
    lr_end: Number = Field(0.0, ge=0)
    warmup_steps: StrictInt = Field(0, ge=0)
    warmup_ratio: Number | None = None
    warmup_lr_init: Number = 0.0
    total_steps: StrictInt = -1
    power: Number | None = None
    num_cycles: Number | None = None
    decay_steps: StrictInt | None = None
    # TabledLR's own (mindferry.spec.Schedule)
    kind: StrictStr | None = None
    warmup_rule: StrictStr | None = None
    warmup_shape: StrictStr | None = None
    timescale: StrictInt | None = None
    shift: StrictInt | None = None
    wsd_decay_steps: StrictInt | None = None
    wsd_shape: StrictStr | None = None


class MegatronConfig(Section):
    """What BlendedMegatronDatasetDataLoader takes; masks made there are for layers that we do not use."""

    data_path: list[StrictStr | StrictInt | float] = Field(min_length=1)
    seq_length: StrictInt = Field(gt=1)
    split: StrictStr = "1, 0, 0"
    seed: StrictInt = Field(1234, ge=0, lt=1 << 32)
    path_to_cache: StrictStr | None = None
    mmap_bin_files: StrictBool = True
    num_dataset_builder_threads: StrictInt = Field(1, gt=0)
    create_attention_mask: Literal[False] = False
    create_compressed_eod_mask: Literal[False] = False
    reset_attention_mask: Literal[False] = False
    reset_position_ids: StrictBool = False
    eod_mask_loss: StrictBool = False
    add_extra_token_to_sequence: Literal[True] = True
    eod: StrictInt = -1
    pad: StrictInt = -1


MEGATRON_LOADER = "BlendedMegatronDatasetDataLoader"


class DataLoader(Section):
    type: StrictStr = "MindDataset"
    dataset_dir: StrictStr | None = None
    dataset_files: StrictStr | list[StrictStr] | None = None
    shuffle: StrictBool = True
    # BlendedMegatronDatasetDataLoader's own
    datasets_type: Literal["GPTDataset"] | None = None
    sizes: list[StrictInt] | None = Field(None, min_length=3, max_length=3)
    config: MegatronConfig | None = None

    @model_validator(mode="after")
    def _keys_of_its_type(self) -> DataLoader:
        megatron, files = ("datasets_type", "sizes", "config"), ("dataset_dir", "dataset_files")
        is_megatron = self.type == MEGATRON_LOADER
        missing = [key for key in megatron if is_megatron and getattr(self, key) is None]
        wrong = [key for key in (files if is_megatron else megatron) if getattr(self, key) is not None]
        if missing or wrong:
            problems = [f"missing {', '.join(missing)}"] * bool(missing)
            problems += [f"{', '.join(wrong)} belong to another loader"] * bool(wrong)
            raise ValueError(f"type {self.type}: {' and '.join(problems)}")
        return self


class TrainDataset(Section):
    data_loader: DataLoader
    input_columns: list[StrictStr]
    construct_args_key: list[StrictStr] | None = None
    num_parallel_workers: StrictInt = Field(1, gt=0)
    python_multiprocessing: StrictBool = False
    drop_remainder: StrictBool = True
    batch_size: StrictInt | None = None
    repeat: StrictInt = 1
    numa_enable: StrictBool = False
    prefetch_size: StrictInt = Field(2, gt=0)
    seed: StrictInt = 0


class TrainDatasetTask(Section):
    type: StrictStr = "CausalLanguageModelDataset"
    dataset_config: Any = None


class JitConfig(Section):
    jit_level: StrictStr = "O0"


class Context(Section):
    mode: StrictInt = Field(0, ge=0, le=1)
    device_target: StrictStr = "CPU"
    device_id: StrictInt = 0
    max_device_memory: StrictStr | None = None
    max_call_depth: StrictInt = 10000
    enable_graph_kernel: StrictBool = False
    jit_config: JitConfig | None = None
    save_graphs: StrictBool | StrictInt = False
    save_graphs_path: StrictStr = "./graph"
    memory_optimize_level: StrictStr | None = None
    ascend_config: dict[str, Any] | None = None
    affinity_cpu_list: Any = None


class Parallel(Section):
    parallel_mode: StrictInt | StrictStr = 0
    gradients_mean: StrictBool = True
    full_batch: StrictBool = False
    enable_alltoall: StrictBool = False
    search_mode: StrictStr = "sharding_propagation"
    enable_parallel_optimizer: StrictBool = False
    parallel_optimizer_config: dict[str, Any] | None = None
    pipeline_config: dict[str, Any] | None = None
    loss_repeated_mean: StrictBool | None = None
    strategy_ckpt_save_file: StrictStr = "./ckpt_strategy.ckpt"
    strategy_ckpt_config: dict[str, Any] | None = None
    comm_fusion: CommFusion | None = None
    dataset_strategy: Any = None


class ParallelConfig(Section):
    data_parallel: StrictInt = Field(1, gt=0)
    model_parallel: StrictInt = Field(1, gt=0)
    context_parallel: StrictInt = Field(1, gt=0)
    expert_parallel: StrictInt = Field(1, gt=0)
    pipeline_stage: StrictInt = Field(1, gt=0)
    micro_batch_num: StrictInt = Field(1, gt=0)
    seq_split_num: StrictInt = Field(1, gt=0)
    use_seq_parallel: StrictBool = False
    optimizer_shard: StrictBool | None = None
    gradient_aggregation_group: StrictInt = 4
    vocab_emb_dp: StrictBool = False
    context_parallel_algo: StrictStr = "colossalai_cp"
    ulysses_degree_in_cp: StrictInt = 1
    mem_coeff: Number = 0.1


class RecomputeConfig(Section):
    recompute: StrictBool | list[Any] = False
    select_recompute: StrictBool | list[Any] | dict[str, Any] = False
    parallel_optimizer_comm_recompute: StrictBool = False
    select_comm_recompute: StrictBool | list[Any] | dict[str, Any] = False
    mp_comm_recompute: StrictBool = True
    recompute_slice_activation: StrictBool = False
    select_recompute_exclude: StrictBool | list[Any] | dict[str, Any] = False
    select_comm_recompute_exclude: StrictBool | list[Any] | dict[str, Any] = False


class Arch(Section):
    type: StrictStr


class Model(Section):
    model_config_: dict[str, Any] = Field(alias="model_config")
    arch: Arch


class LossMonitor(Section):
    type: StrictStr
    per_print_times: StrictInt = Field(1, gt=0)


class TimeMonitor(Section):
    type: StrictStr
    data_size: StrictInt | None = Field(None, gt=0)
    data_time: StrictBool = False


class CheckpointMonitor(Section):
    type: StrictStr
    directory: StrictStr = "./checkpoints"
    prefix: StrictStr = "step"
    save_checkpoint_steps: StrictInt = Field(gt=0)
    keep_checkpoint_max: StrictInt = Field(2, gt=0)
    integrated_save: StrictBool = False
    async_save: StrictBool = False
    checkpoint_format: StrictStr = "safetensors"


# Callbacks that have a schema of their own; any other registered mindformers callback passes through.
CALLBACKS: dict[str, type[Section]] = {
    "MFLossMonitor": LossMonitor,
    "LossMonitor": LossMonitor,
    "TimeMonitor": TimeMonitor,
    "CheckpointMonitor": CheckpointMonitor,
}


class RunYaml(Section):
    """The whole file. Settings at the top level are mindformers' general configuration."""

    seed: StrictInt = Field(42, ge=0)
    run_mode: StrictStr = "train"
    output_dir: StrictStr = "./output"
    use_parallel: StrictBool = False
    use_legacy: StrictBool = False
    use_legacy_format: StrictBool = True
    load_checkpoint: StrictStr = ""
    load_ckpt_format: StrictStr = "safetensors"
    auto_trans_ckpt: StrictBool = False
    src_strategy_path_or_dir: StrictStr = ""
    resume_training: StrictBool = False
    ignore_data_skip: StrictBool = False
    print_separate_loss: StrictBool = False
    micro_batch_interleave_num: StrictInt = 1
    # MindSpore's profiler, on Ascend; `doctor comm --profile` reads what it writes
    profile: StrictBool = False
    profile_communication: StrictBool = False
    profile_memory: StrictBool = True
    profile_start_step: StrictInt = Field(1, gt=0)
    profile_stop_step: StrictInt = Field(10, gt=0)
    profile_level: Literal[0, 1, 2] = 1
    profile_rank_ids: list[StrictInt] | None = None
    init_start_profile: StrictBool = False

    trainer: Trainer = Trainer()
    runner_config: RunnerConfig
    runner_wrapper: RunnerWrapper = RunnerWrapper()
    optimizer: Optimizer = Optimizer()
    lr_schedule: LrSchedule
    train_dataset: TrainDataset
    train_dataset_task: TrainDatasetTask = TrainDatasetTask()
    context: Context = Context()
    parallel: Parallel = Parallel()
    parallel_config: ParallelConfig = ParallelConfig()
    recompute_config: RecomputeConfig = RecomputeConfig()
    swap_config: dict[str, Any] | None = None
    monitor_config: dict[str, Any] | None = None
    callbacks: list[dict[str, Any]] = []
    model: Model
