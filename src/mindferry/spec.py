"""What every room speaks: ModelSpec, Recipe, Parallelism, Machine.

Sources turn files into these, targets turn these into files. They are frozen, closed (an unknown field
is an error) and printable, and nothing else crosses from one room to another.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, strict=True)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

# The exact function, never just "gelu": frameworks disagree on what that word means.
Activation = Literal["gelu_tanh", "gelu_erf", "silu", "relu"]
DType = Literal["float32", "float16", "bfloat16"]


class Spec(BaseModel):
    """Base of all specs: closed and immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class RopeScaling(Spec):
    """Rotary frequency scaling as the source states it; values are kept, never re-derived.

    `type` follows Hugging Face's `rope_type`; the fields that a type does not use stay None.
    """

    type: Literal["linear", "dynamic", "yarn", "llama3"]
    factor: PositiveFloat
    original_max_position_embeddings: PositiveInt | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


class ModelSpec(Spec):
    """What the network is, independent of any framework. Sizes are counts of elements.

    Attributes:
        kv_channels: size of one attention head (head_dim); hidden_size // num_attention_heads unless stated.
        num_query_groups: key/value heads; equal to num_attention_heads without grouped-query attention.
        ffn_hidden_size: inner size of the MLP (of one branch, when gated).
        layernorm_epsilon: added to the variance inside the square root, for every norm of the model.
        init_method_std: standard deviation of the normal initialisation of weights.
    """

    family: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    kv_channels: PositiveInt
    ffn_hidden_size: PositiveInt
    max_position_embeddings: PositiveInt

    position_embedding: Literal["learned_absolute", "rope", "none"]
    rotary_base: PositiveFloat = 10000.0
    rotary_percent: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    rope_scaling: RopeScaling | None = None
    sliding_window: PositiveInt | None = None

    normalization: Literal["LayerNorm", "RMSNorm"]
    layernorm_epsilon: PositiveFloat
    qk_layernorm: bool = False
    parallel_residual: bool = False

    activation: Activation
    gated_linear_unit: bool = False
    add_bias_linear: bool
    add_qkv_bias: bool

    tie_word_embeddings: bool
    embedding_dropout: Probability = 0.0
    hidden_dropout: Probability = 0.0
    attention_dropout: Probability = 0.0
    init_method_std: PositiveFloat = 0.02

    bos_token_id: NonNegativeInt | None = None
    eos_token_id: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self

    def num_parameters(self) -> int:
        """Exact count of trainable parameters, tied weights counted once."""
        h, d = self.hidden_size, self.kv_channels
        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * d
        proj = self.num_attention_heads * d
        fc1 = self.ffn_hidden_size * (2 if self.gated_linear_unit else 1)
        norm = 2 * h if self.normalization == "LayerNorm" else h
        layer = qkv * h + proj * h + fc1 * h + self.ffn_hidden_size * h + 2 * norm
        if self.add_bias_linear:
            layer += h + fc1 + h
        if self.add_bias_linear or self.add_qkv_bias:
            layer += qkv
        if self.qk_layernorm:
            layer += 2 * d
        total = self.num_layers * layer + norm + self.vocab_size * h
        if self.position_embedding == "learned_absolute":
            total += self.max_position_embeddings * h
        if not self.tie_word_embeddings:
            total += self.vocab_size * h
        return total


class Schedule(Spec):
    """Learning rate over optimizer steps s = 0, 1, ...: the rate used by update number s.

    The formulas are in mindferry.recipes.schedule. Warm-up rises from warmup_init to learning_rate over
    s < warmup_steps; then `kind` decays to min_learning_rate, which it has reached at decay_steps.

    Attributes:
        warmup_rule: progress of the warm-up at step t of w: transformers, Megatron-LM and nanoGPT before
            December 2024 have t/w, nanoGPT since then (t+1)/(w+1), gpt-neox max(1,t)/w.
        warmup_shape: of the warm-up; only transformers' warmup_stable_decay has others than linear.
        decay_steps: step at which the decay ends, where that is not the end of the run.
        num_cycles: waves of a cosine (0.5 = down once), or number of hard restarts.
        timescale, shift: inverse_sqrt is learning_rate / sqrt(max(s + shift, 1) / timescale).
        wsd_decay_steps, wsd_shape: length and shape of the decay that ends a warmup-stable-decay schedule.
    """

    kind: Literal[
        "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "wsd"
    ] = "cosine"
    learning_rate: PositiveFloat
    min_learning_rate: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    warmup_init: NonNegativeFloat = 0.0
    warmup_rule: Literal["t/w", "(t+1)/(w+1)", "max(1,t)/w"] = "t/w"
    warmup_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    total_steps: PositiveInt
    decay_steps: PositiveInt | None = None
    num_cycles: PositiveFloat = 0.5
    power: PositiveFloat = 1.0
    timescale: PositiveInt | None = None
    shift: int = 0
    wsd_decay_steps: NonNegativeInt | None = None
    wsd_shape: Literal["linear", "cosine", "1-sqrt", "exponential"] = "cosine"

    @model_validator(mode="after")
    def _fits(self) -> Schedule:
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is above learning_rate {self.learning_rate:g}"
            )
        if self.kind == "wsd":
            if self.wsd_decay_steps is None:
                raise ValueError("a wsd schedule needs wsd_decay_steps")
            end = self.decay_steps or self.total_steps
            if self.warmup_steps + self.wsd_decay_steps > end:
                raise ValueError(
                    f"warmup_steps {self.warmup_steps} + wsd_decay_steps {self.wsd_decay_steps} is more than "
                    f"the {end} steps of the schedule"
                )
        return self


class OptimizerSpec(Spec):
    """AdamW with decoupled decay and bias correction.

    Attributes:
        decay: which tensors are decayed: "matrices" leaves out 1-D tensors and biases (mindformers, Megatron-LM,
            nanoGPT and transformers' Trainer agree on that for GPT models), "all" decays every tensor
            (torch.optim.AdamW given all parameters in one group).
    """

    kind: Literal["AdamW"] = "AdamW"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    decay: Literal["matrices", "all"] = "matrices"


class LossScale(Spec):
    """Factor on the loss before the backward pass, so that small fp16 gradients do not vanish.

    Static: only `value`. Dynamic: an overflow divides by `factor` (not below `floor`) and skips the update;
    `window` steps in a row without one multiply by `factor`.
    """

    dynamic: bool = False
    value: PositiveFloat = 1.0
    factor: Annotated[float, Field(gt=1.0)] = 2.0
    window: PositiveInt = 2000
    floor: PositiveFloat = 1.0


class Precision(Spec):
    """Data types of the parts of a step. Parameters and optimizer states stay in `params`.

    fp32_residual: additions to the residual stream are float32 whatever `compute` is (amp_level O1).
    """

    compute: DType = "float32"
    params: DType = "float32"
    layernorm: DType = "float32"
    softmax: DType = "float32"
    fp32_residual: bool = False


class Recompute(Spec):
    """What the backward pass computes again instead of keeping it: memory for time, the same numbers.

    True means every layer, a number the first so many.

    Attributes:
        layers: whole layers.
        core_attention: scores, softmax and their product with the values (Megatron-LM's "selective").
        attention: core_attention and the projections around it.
        parallel_optimizer_comm: gather sharded weights again for the backward pass.
        mp_comm: do the communication of tensor parallelism again.
    """

    layers: bool | PositiveInt = False
    core_attention: bool | PositiveInt = False
    attention: bool | PositiveInt = False
    mlp: bool | PositiveInt = False
    parallel_optimizer_comm: bool = False
    mp_comm: bool = True

    @model_validator(mode="after")
    def _once(self) -> Recompute:
        parts = [name for name in ("core_attention", "attention", "mlp") if getattr(self, name)]
        if self.layers is True and parts:
            raise ValueError(f"{' and '.join(parts)}: whole layers are recomputed already")
        if self.core_attention and self.attention:
            raise ValueError("core_attention is a part of attention; choose one")
        return self


class Recipe(Spec):
    """How the network is trained.

    Attributes:
        batch_size: sequences per micro-batch and process.
        gradient_accumulation_steps: micro-batches per optimizer step and process.
        per_token_loss: True averages the loss over all tokens of a step (transformers' Trainer since 4.46,
            Megatron-LM's --calculate-per-token-loss); False averages the micro-batches' means (nanoGPT,
            Megatron-LM's default). The same number when every micro-batch has as many tokens.
        max_grad_norm: None: no clipping.
    """

    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: Schedule
    precision: Precision = Precision()
    seq_length: PositiveInt
    batch_size: PositiveInt = 8
    gradient_accumulation_steps: PositiveInt = 1
    max_grad_norm: PositiveFloat | None = 1.0
    per_token_loss: bool = False
    loss_scale: LossScale = LossScale()
    recompute: Recompute = Recompute()
    seed: NonNegativeInt = 42

    @field_validator("loss_scale", mode="before")
    @classmethod
    def _static(cls, value: Any) -> Any:
        """A bare number is a static scale."""
        return LossScale(value=value) if isinstance(value, (int, float)) else value

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step and process."""
        return self.batch_size * self.gradient_accumulation_steps


class Parallelism(Spec):
    """How the work is cut: devices = data_parallel x model_parallel x context_parallel x pipeline_stage."""

    data_parallel: PositiveInt = 1
    model_parallel: PositiveInt = 1
    context_parallel: PositiveInt = 1
    pipeline_stage: PositiveInt = 1
    micro_batch_num: PositiveInt = 1
    use_seq_parallel: bool = False
    optimizer_shard_level: Literal[0, 1, 2, 3] = 0

    @property
    def devices(self) -> int:
        return self.data_parallel * self.model_parallel * self.context_parallel * self.pipeline_stage


class Machine(Spec):
    """One device, as the planner and the benchmarks see it (bytes, bytes/s, FLOP/s)."""

    name: str
    memory_bytes: PositiveInt
    flops: dict[DType, PositiveFloat]
    memory_bandwidth: PositiveFloat
    devices_per_host: PositiveInt = 1
    intra_host_bandwidth: PositiveFloat | None = None
    inter_host_bandwidth: PositiveFloat | None = None


def spec_from(cls: type[Spec], values: dict[str, Any], origin: str) -> Any:
    """Build `cls` from `values`; every violation is reported at once, with the origin named.

    Raises:
        UsageError: a value is missing, unknown, or of the wrong kind.
    """
    from pydantic import ValidationError

    from mindferry.errors import UsageError, did_you_mean

    try:
        return cls(**values)
    except ValidationError as err:
        problems = []
        for item in err.errors():
            key = ".".join(str(part) for part in item["loc"]) or "(whole)"
            hint = did_you_mean(key, cls.model_fields) if item["type"] == "extra_forbidden" else ""
            shown = "" if item["type"] in ("missing", "extra_forbidden") else f", found {item['input']!r}"
            problems.append(f"{key}: {item['msg']}{shown}{' - ' + hint if hint else ''}")
        raise UsageError(
            f"{origin}: " + "; ".join(problems),
            remedy="correct the named keys",
            id="config.invalid",
        ) from None
