"""Rules about device counts and about how the model's sizes divide; see constraints.py."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mindferry.planning.layout import BEFORE, BUILD, SILENT, Layout, Rule, registrar
from mindferry.planning.strategy import divisors

RULES: list[Rule] = []
_rule = registrar(RULES)


_COUNTS = (
    "devices", "data_parallel", "model_parallel", "context_parallel", "pipeline_stage", "expert_parallel",
    "micro_batch_num", "gradient_accumulation_steps", "micro_batch_interleave_num", "batch_size",
    "pp_interleave_num", "seq_split_num", "fine_grain_interleave", "ulysses_degree_in_cp",
)  # fmt: skip


# ---- how many devices, and which degree divides what -------------------------------------------------------


@_rule("degrees.positive", BEFORE, "planner")
def _positive(x: Layout) -> Iterator[tuple[str, str]]:
    for name in _COUNTS:
        value = getattr(x, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{name} must be a positive integer, but got {value!r}", f"set {name} to at least 1"


@_rule("devices.product", BEFORE, "mindformers tools/check_rules.py")
def _product(x: Layout) -> Iterator[tuple[str, str]]:
    d, t, c, p = x.data_parallel, x.model_parallel, x.context_parallel, x.pipeline_stage
    if x.semi_auto and x.product != x.devices:
        rest = t * c * p
        if rest and x.devices % rest == 0:
            way = f"data_parallel {x.devices // rest} = {x.devices} / ({t} x {c} x {p})"
        else:
            fits = divisors(x.devices)
            way = f"model_parallel x context_parallel x pipeline_stage must divide {x.devices}: {fits}"
        yield (
            "The parallel config data_parallel * model_parallel * context_parallel * pipeline_stage should "
            f"be equal to device_num, but get dp*mp*sp*pp = {d}*{t}*{c}*{p} = {d * t * c * p} != "
            f"device_num({x.devices})",
            way,
        )


@_rule("devices.stage", BUILD, "MindSpore, setting the parallel context")
def _stage(x: Layout) -> Iterator[tuple[str, str]]:
    if x.semi_auto and x.devices % x.pipeline_stage:
        yield (
            f"Device_num must be divisible by stage_num, got device_num: {x.devices}, stage_num: "
            f"{x.pipeline_stage}",
            f"pipeline_stage one of {divisors(x.devices)}",
        )


@_rule("devices.power-of-two", BUILD, "MindSpore", "warning")
def _power_of_two(x: Layout) -> Iterator[tuple[str, str]]:
    n = x.devices
    if (n > 8 and n % 8) or (n < 8 and n not in (1, 2, 4, 8)):
        yield (
            f"{n} devices: some MindSpore paths ask that device_num is divisible by 8 or equal to 1, 2 or 4",
            "semi_auto_parallel with stated degrees avoids the strategy search that needs it; try the "
            "DryRun command first",
        )
    if x.parallel_mode == 2 and n & (n - 1):
        yield f"{n} devices: the automatic strategy search needs a power of two", "parallel_mode: 1"


@_rule("devices.hosts", BUILD, "mindformers tools/check_rules.py", "warning")
def _hosts(x: Layout) -> Iterator[tuple[str, str]]:
    hosts = -(-x.devices // x.devices_per_host)
    if x.semi_auto and hosts > 1 and hosts % x.pipeline_stage:
        yield (
            f"server_num % pipeline_stage = {hosts} % {x.pipeline_stage} = {hosts % x.pipeline_stage} != 0, "
            "which may cause parallel error when using multiple servers",
            "a pipeline_stage that divides the hosts, or hosts that hold whole stages",
        )


@_rule("model_parallel.host", SILENT, "planner", "warning")
def _inside_host(x: Layout) -> Iterator[tuple[str, str]]:
    if x.model_parallel > x.devices_per_host:
        yield (
            f"model_parallel {x.model_parallel} spans hosts of {x.devices_per_host} devices: every layer "
            "waits for the slow network",
            f"model_parallel at most {x.devices_per_host}",
        )


# ---- the model against the cut -----------------------------------------------------------------------------


@_rule("heads.model_parallel", BUILD, "mindformers parallel_core/transformer_config.py")
def _heads(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    t, a, k = x.model_parallel, x.num_attention_heads, x.num_query_groups
    fits = [i for i in divisors(a) if k % i == 0]
    way = f"model_parallel one of {fits}"
    if a % t:
        if x.use_legacy:
            yield (
                "For 'MultiHeadAttention', the class variable 'num_heads' must be a multiple of "
                f"'parallel_config.model_parallel', but got the num_heads is {a} and the "
                f"parallel_config.model_parallel  is {t}.",
                way,
            )
        else:
            yield f"num_attention_heads ({a}) must be a multiple of tensor_model_parallel_size ({t}).", way
    elif k % t:
        yield (
            "For 'ParallelAttention', the class variable 'kv_num_heads' must be a multiple of "
            f"'tensor_parallel * ulysses_cp_num', but got kv_num_heads is {k}, tensor_parallel is {t}, "
            f"ulysses_cp_num is {x.ulysses_degree_in_cp}.",
            way,
        )


@_rule("hidden.model_parallel", BUILD, "mindformers parallel_core, row and column splits")
def _hidden(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    t = x.model_parallel
    if x.hidden_size % x.num_attention_heads:
        yield (
            "For 'MultiHeadAttention', the class variable 'hidden_size' must be a multiple of 'num_heads', "
            f"but got the hidden_size is {x.hidden_size} and the num_heads is {x.num_attention_heads}.",
            "use the source's sizes; they do not come from the cut",
        )
    for name, size in (("hidden_size", x.hidden_size), ("ffn_hidden_size", x.ffn_hidden_size)):
        if size % t:
            yield (
                f"numerator({size}) is not divisible by denominator({t}).",
                f"{name} {size} needs model_parallel in {divisors(size)}",
            )


@_rule("vocab.model_parallel", BUILD, "mindformers parallel_core/training_graph/tensor_parallel/layers.py")
def _vocab(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.sizes_known:
        return
    t, vocab = x.model_parallel, x.vocab_size
    if not x.semi_auto or t == 1:
        return
    padded = padded_vocab(vocab, t)
    way = (
        f"vocab_size {padded} ({padded - vocab} unused rows, {(padded - vocab) * x.hidden_size:,} parameters)"
    )
    # The legacy embedding is split only when vocab_emb_dp is off, which a pipeline forces.
    split = x.pipeline_stage > 1 or not x.vocab_emb_dp
    if vocab % t and x.use_legacy and split:
        yield (
            f"The vocab size of the embedding {vocab} must be a multiple of parallel_config.model_parallel "
            f"{t}.",
            way if x.pipeline_stage > 1 else f"{way}, or vocab_emb_dp: True",
        )
    if vocab % t and not x.use_legacy:
        yield f"numerator({vocab}) is not divisible by denominator({t}).", way
    if not x.use_legacy and x.learned_positions and x.max_position_embeddings % t:
        yield (
            f"numerator({x.max_position_embeddings}) is not divisible by denominator({t}).",
            f"max_position_embeddings a multiple of {t}",
        )


@_rule(
    "vocab.emb_dp",
    SILENT,
    "mindformers core/parallel_config.py, parallel_core/transformer_config.py",
    "warning",
)
def _vocab_emb_dp(x: Layout) -> Iterator[tuple[str, str]]:
    if not x.vocab_emb_dp or not x.semi_auto:
        return
    if not x.use_legacy:
        yield (
            "vocab_emb_dp is not supported in MCore, it will be converted to False automatically.",
            "vocab_emb_dp: False",
        )
    elif x.pipeline_stage > 1:
        yield (
            f"pipeline_stage = {x.pipeline_stage} > 1, vocab_emb_dp will be reset to False.",
            "vocab_emb_dp: False",
        )


def padded_vocab(vocab: int, model_parallel: int) -> int:
    """Smallest vocabulary of at least `vocab` rows that `model_parallel` and 128 (matrix tiles) divide."""
    step = math.lcm(128, model_parallel)
    return vocab if vocab % model_parallel == 0 else -(-vocab // step) * step


@_rule("sequence.parallel", BUILD, "mindformers parallel_core/transformer_config.py")
def _sequence(x: Layout) -> Iterator[tuple[str, str]]:
    t, c = x.model_parallel, x.context_parallel
    if x.use_seq_parallel and t <= 1 and not x.use_legacy:
        yield "Can not use sequence parallelism without tensor parallelism", "use_seq_parallel: False"
    cut = c * (t if x.use_seq_parallel else 1)
    if x.seq_length % cut:
        yield (
            f"seq_length {x.seq_length} is not divisible by the {cut} ranks that split it",
            f"seq_length a multiple of {cut}",
        )


@_rule("context_parallel", BEFORE, "mindformers tools/check_rules.py")
def _context(x: Layout) -> Iterator[tuple[str, str]]:
    c, t, u = x.context_parallel, x.model_parallel, x.ulysses_degree_in_cp
    if c <= 1:
        return
    if not x.use_flash_attention:
        yield (
            "context_parallel is only available for flash attention for now, but got use_flash_attention "
            "False, please set use_flash_attention=True",
            "use_flash_attention: True",
        )
    heads = x.num_query_groups or x.num_attention_heads
    if x.context_parallel_algo == "ulysses_cp" and c * t > heads:
        yield (
            "ulysses_cp and mp is shard attention head, it need cp * mp <= attention head, but got "
            f"attention head which is {heads}, and cp * mp = {c * t},please check num_heads and n_kv_heads.",
            f"context_parallel at most {heads // t}, or colossalai_cp",
        )
    if u and c % u:
        yield (
            f"context_parallel {c} should be divisible by ulysses_degree_in_cp {u}",
            f"ulysses_degree_in_cp in {divisors(c)}",
        )
    if x.context_parallel_algo not in ("colossalai_cp", "ulysses_cp") and not x.use_legacy:
        yield (
            f"The context_parallel_algo {x.context_parallel_algo} is not supported, context_parallel_algo "
            "only support colossalai_cp, ulysses_cp or hybrid_cp",
            "colossalai_cp or ulysses_cp (mindformers 1.9 refuses hybrid_cp in spite of the message)",
        )


@_rule("moe.sequence", BEFORE, "mindformers tools/check_rules.py")
def _moe(x: Layout) -> Iterator[tuple[str, str]]:
    if x.num_experts > 1 and x.model_parallel > 1 and not x.use_seq_parallel:
        yield (
            "During training, performance may degrade if MoE and tensor parallelism are enabled without "
            "also enabling sequence parallelism.",
            "use_seq_parallel: True",
        )
