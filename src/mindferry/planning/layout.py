"""What a YAML says about parallelism, and what a broken rule looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mindferry.planning.estimate import Job
    from mindferry.planning.strategy import Strategy

BEFORE, BUILD, COMPILE, SILENT = (
    "when the Trainer reads the YAML",
    "when the network is built",
    "when the graph is compiled, minutes after the start",
    "in no message: the run goes on with other numbers",
)


@dataclass(frozen=True)
class Violation:
    """A broken rule.

    Attributes:
        rule: stable id ("devices.product").
        message: what the framework would say, or what goes wrong where it says nothing.
        when: at which point of a run it shows.
        where: the code that raises, or "planner".
        remedy: what to change.
        severity: "problem" stops or spoils the run, "warning" does not.
    """

    rule: str
    message: str
    when: str
    where: str
    remedy: str = ""
    severity: Literal["problem", "warning"] = "problem"


@dataclass
class Layout:
    """What a YAML says about parallelism, before anyone checked it. Names are mindformers'.

    sizes_known is False when the model's sizes were not at hand; rules about them are skipped then.
    """

    devices: int = 1
    data_parallel: int = 1
    model_parallel: int = 1
    context_parallel: int = 1
    pipeline_stage: int = 1
    expert_parallel: int = 1
    micro_batch_num: int = 1
    gradient_accumulation_steps: int = 1
    micro_batch_interleave_num: int = 1
    batch_size: int = 1
    pp_interleave_num: int = 1
    pipeline_interleave: bool = False
    pipeline_scheduler: str = "1f1b"
    seq_split_num: int = 1
    use_seq_parallel: bool = False
    vocab_emb_dp: bool = False
    context_parallel_algo: str = "colossalai_cp"
    ulysses_degree_in_cp: int = 1
    parallel_mode: int = 1
    use_parallel: bool = True
    use_legacy: bool = False
    auto_pipeline: bool = False
    full_batch: bool = True
    dataset_strategy: Any = None
    input_columns: tuple[str, ...] = ()
    enable_parallel_optimizer: bool = False
    parallel_optimizer_config: dict[str, Any] = field(default_factory=dict)
    offset: Any = 0
    recompute: Any = False
    select_recompute: Any = False
    select_comm_recompute: Any = False
    recompute_slice_activation: bool = False
    swap: bool = False
    use_flash_attention: bool = True
    fine_grain_interleave: int = 1
    num_experts: int = 0
    sizes_known: bool = True
    family: str = ""
    num_layers: int = 1
    hidden_size: int = 1
    num_attention_heads: int = 1
    num_query_groups: int = 1
    ffn_hidden_size: int = 1
    vocab_size: int = 1
    seq_length: int = 1
    max_position_embeddings: int = 0
    learned_positions: bool = False
    gated_linear_unit: bool = False
    devices_per_host: int = 8
    global_batch: int | None = None

    @property
    def semi_auto(self) -> bool:
        """Parallel modes in which degrees other than data_parallel count at all."""
        return self.use_parallel and self.parallel_mode in (1, 2)

    @property
    def virtual(self) -> int:
        """pp_interleave_num as it takes effect: only with pipeline_interleave and a pipeline."""
        return self.pp_interleave_num if self.pipeline_interleave and self.pipeline_stage > 1 else 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step as they take effect: the other of the two settings is reset by the Trainer."""
        if not self.semi_auto:
            return 1
        return self.micro_batch_num if self.pipeline_stage > 1 else self.gradient_accumulation_steps

    @property
    def effective_batch(self) -> int:
        """Sequences an optimizer step, as trainer/base_trainer.py computes them."""
        ranks = self.data_parallel if self.semi_auto else self.devices
        interleave = self.micro_batch_interleave_num if self.semi_auto else 1
        return self.batch_size * ranks * self.micro_batches * interleave

    @property
    def product(self) -> int:
        return self.data_parallel * self.model_parallel * self.context_parallel * self.pipeline_stage

    @property
    def optimizer_shard_level(self) -> int:
        """0 to 3; level 2 is also spelt gradient_accumulation_shard."""
        if not self.enable_parallel_optimizer:
            return 0
        level = str(self.parallel_optimizer_config.get("optimizer_level", ""))
        if level in ("level1", "level2", "level3"):
            return int(level[-1])
        return 2 if self.parallel_optimizer_config.get("gradient_accumulation_shard") else 1


Check = Callable[[Layout], Iterator[tuple[str, str]]]


@dataclass(frozen=True)
class Rule:
    """A rule: `check` yields (message, remedy) for each violation."""

    id: str
    when: str
    where: str
    severity: Literal["problem", "warning"]
    check: Check

    def violations(self, layout: Layout) -> Iterator[Violation]:
        for message, remedy in self.check(layout):
            yield Violation(self.id, message, self.when, self.where, remedy, self.severity)


def registrar(rules: list[Rule]) -> Callable[..., Callable[[Check], Check]]:
    """A decorator that puts a check into `rules` with its id, time, place and severity."""

    def rule(
        id: str, when: str, where: str, severity: Literal["problem", "warning"] = "problem"
    ) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            rules.append(Rule(id, when, where, severity, check))
            return check

        return add

    return rule


def layout_of(st: Strategy, job: Job) -> Layout:
    """The layout that the YAML of `st` states; what `check` finds here would be a fault of the search."""
    m = job.model
    full = st.recompute_name == "full"
    config: dict[str, Any] = {}
    if st.optimizer_shard_level:
        config["optimizer_level"] = f"level{st.optimizer_shard_level}"
        config["optimizer_weight_shard_size"] = st.optimizer_weight_shard_size or -1
    pipeline = st.pipeline_stage > 1
    return Layout(
        devices=st.devices, data_parallel=st.data_parallel, model_parallel=st.model_parallel,
        context_parallel=st.context_parallel, pipeline_stage=st.pipeline_stage,
        micro_batch_num=st.micro_batch_num if pipeline else 1,
        gradient_accumulation_steps=1 if pipeline else st.micro_batch_num, batch_size=st.batch_size,
        pp_interleave_num=st.pp_interleave_num, pipeline_interleave=st.pp_interleave_num > 1,
        use_seq_parallel=st.use_seq_parallel, full_batch=False, dataset_strategy=[[st.data_parallel, 1]],
        enable_parallel_optimizer=bool(st.optimizer_shard_level), parallel_optimizer_config=config,
        offset=st.offset(m.num_layers), recompute=True if full else list(st.recompute) if any(st.recompute)
        else False, select_recompute=["x"] if st.select else False, use_flash_attention=job.flash_attention,
        family=m.family, num_layers=m.num_layers, hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads, num_query_groups=m.num_query_groups,
        ffn_hidden_size=m.ffn_hidden_size, vocab_size=st.vocab_size or m.vocab_size,
        seq_length=job.seq_length, max_position_embeddings=m.max_position_embeddings,
        learned_positions=m.position_embedding == "learned_absolute", gated_linear_unit=m.gated_linear_unit,
        devices_per_host=job.device.devices_per_host, global_batch=job.global_batch,
    )  # fmt: skip
