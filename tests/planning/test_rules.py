"""The rules against mindformers' and MindSpore's own code: the same inputs are refused, with the same words."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from mindferry.planning import constraints
from mindferry.planning.layout import Layout
from mindferry.planning.rules_model import padded_vocab
from mindferry.planning.strategy import balanced_layers, even_layers, place_layers

GPT2 = {
    "family": "gpt2", "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "num_query_groups": 12,
    "ffn_hidden_size": 3072, "vocab_size": 50257, "seq_length": 1024, "max_position_embeddings": 1024,
    "learned_positions": True,
}  # fmt: skip


def layout(**changes):
    return Layout(**{"devices": 1, "full_batch": True, **GPT2, **changes})


def messages(x, severity="problem"):
    return {item.rule: item.message for item in constraints.check(x) if item.severity == severity}


def words(text):
    return re.sub(r"\s+", " ", str(text)).strip()


@pytest.fixture(scope="module")
def mindformers():
    os.environ.setdefault("GLOG_v", "3")
    import mindspore as ms
    from mindformers.core.context import build_mf_context
    from mindformers.parallel_core.training_graph.transformer import utils
    from mindformers.parallel_core.transformer_config import TransformerConfig
    from mindformers.tools import check_rules

    assert build_mf_context
    return SimpleNamespace(
        ms=ms,
        TransformerConfig=TransformerConfig,
        LayerSetting=utils.LayerSetting,
        utils=utils,
        check_rules=check_rules,
    )


@pytest.fixture
def mcore(mindformers, monkeypatch):
    monkeypatch.setattr(mindformers.utils, "is_legacy_model", lambda: False)
    monkeypatch.setattr(mindformers.ms, "get_auto_parallel_context", lambda name: {
        "parallel_mode": "semi_auto_parallel", "pipeline_interleave": True, "pipeline_scheduler": "1f1b",
        "full_batch": True,
    }.get(name))  # fmt: skip
    return mindformers


def raised(call):
    try:
        call()
    except (ValueError, TypeError) as err:
        return words(err)
    return None


# ---- TransformerConfig ------------------------------------------------------------------------------------------

CONFIGS = [
    {
        "num_attention_heads": 25,
        "hidden_size": 1600,
        "num_query_groups": 25,
        "ffn_hidden_size": 6400,
        "model_parallel": 2,
    },
    {"model_parallel": 5},
    {"use_seq_parallel": True},
    {"recompute_slice_activation": True},
    {"context_parallel": 2, "use_flash_attention": False},
    {"model_parallel": 4, "use_seq_parallel": True},
    {},
]


@pytest.mark.parametrize("changes", CONFIGS)
def test_transformer_config_raises_what_we_say(mcore, changes):
    x = layout(
        **changes,
        devices=changes.get("model_parallel", 1) * changes.get("context_parallel", 1),
        vocab_size=50400,
    )
    theirs = raised(
        lambda: mcore.TransformerConfig(
            num_layers=x.num_layers, hidden_size=x.hidden_size, num_attention_heads=x.num_attention_heads,
            tensor_model_parallel_size=x.model_parallel, context_parallel_size=x.context_parallel,
            sequence_parallel=x.use_seq_parallel, use_flash_attention=x.use_flash_attention,
            recompute_slice_activation=x.recompute_slice_activation, hidden_dropout=0.0, attention_dropout=0.0,
        )
    )  # fmt: skip
    ours = [words(m) for m in messages(x).values()]
    if theirs is None:
        assert ours == []
    elif "context_parallel" in theirs:
        assert any(m.startswith("context_parallel is only available for flash attention") for m in ours)
    else:
        assert theirs in ours


@pytest.mark.parametrize("changes", [
    {"pp_interleave_num": 1, "pipeline_stage": 4, "micro_batch_num": 8},
    {"pp_interleave_num": 2, "pipeline_stage": 1, "micro_batch_num": 8},
    {"pp_interleave_num": 2, "pipeline_stage": 4, "micro_batch_num": 7},
    {"pp_interleave_num": 2, "pipeline_stage": 4, "micro_batch_num": 8, "recompute": [1, 1, 1, 1]},
])  # fmt: skip
def test_zero_bubble_rules(mcore, monkeypatch, changes):
    monkeypatch.setattr(mcore.ms, "get_auto_parallel_context", lambda name: "zero_bubble_v")
    x = layout(
        **changes,
        devices=changes["pipeline_stage"],
        pipeline_scheduler="zero_bubble_v",
        pipeline_interleave=True,
    )
    theirs = raised(
        lambda: mcore.TransformerConfig(
            num_layers=12, hidden_size=768, num_attention_heads=12, hidden_dropout=0.0, attention_dropout=0.0,
            pipeline_model_parallel_size=x.pipeline_stage, micro_batch_num=x.micro_batch_num,
            virtual_pipeline_model_parallel_size=x.pp_interleave_num, recompute=x.recompute,
        )
    )  # fmt: skip
    assert theirs is not None
    assert theirs in [words(item.message) for item in constraints.check(x)]


# ---- LayerSetting -----------------------------------------------------------------------------------------------


def layer_setting(mcore, layers, p, v, offset, recompute=False):
    config = mcore.TransformerConfig(
        num_layers=layers, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v, offset=offset, recompute=recompute,
    )  # fmt: skip
    return mcore.LayerSetting(layers, offset, config, v)


offsets = hs.one_of(
    hs.integers(-3, 4),
    hs.lists(hs.integers(-3, 4), min_size=1, max_size=5),
    hs.integers(1, 5).flatmap(
        lambda n: hs.lists(hs.lists(hs.integers(-2, 3), min_size=n, max_size=n), min_size=1, max_size=4)
    ),
)


def test_offsets_are_refused_as_layer_setting_does(mcore):
    @settings(max_examples=150, deadline=None)
    @given(layers=hs.integers(1, 40), p=hs.integers(1, 5), v=hs.integers(1, 3), offset=offsets)
    def run(layers, p, v, offset):
        if layers < p * v:
            return
        theirs = raised(lambda: layer_setting(mcore, layers, p, v, offset))
        x = layout(num_layers=layers, pipeline_stage=p, devices=p, pp_interleave_num=v, pipeline_interleave=v > 1,
                   micro_batch_num=p, offset=offset)  # fmt: skip
        if p == 1 and v > 1:
            return  # virtual stages without a pipeline: we say they have no effect
        ours = messages(x).get("pipeline.offset")
        assert (ours is None) == (theirs is None), (ours, theirs)
        if ours is not None:
            assert words(ours) == theirs

    run()


def test_layers_are_placed_as_layer_setting_does(mcore):
    @settings(max_examples=120, deadline=None)
    @given(
        layers=hs.integers(1, 60),
        p=hs.integers(1, 6),
        v=hs.integers(1, 3),
        offset=hs.integers(0, 3),
        balanced=hs.booleans(),
    )
    def run(layers, p, v, offset, balanced):
        if layers < p * v or p * v == 1:
            return
        if balanced:
            rows = balanced_layers(layers, p, v, 0.0, float(offset))
            value = [[n - layers // (p * v) for n in row] for row in rows]
        else:
            value = offset
        if raised(lambda: layer_setting(mcore, layers, p, v, value)):
            assert not balanced
            return
        setting = layer_setting(mcore, layers, p, v, value)
        counts = np.zeros((v, p), int)
        for pp_id, inter in zip(setting.pp_ids, setting.interleave_ids, strict=True):
            counts[inter, pp_id] += 1
        assert place_layers(layers, p, v, value) == counts.tolist()

    run()


def test_a_broadcast_offset_that_promises_too_many_layers_is_found(mcore):
    layer_setting(mcore, 10, 2, 2, [1, 1])  # passes there
    x = layout(num_layers=10, pipeline_stage=2, devices=2, pp_interleave_num=2, pipeline_interleave=True,
               micro_batch_num=4, offset=[1, 1])  # fmt: skip
    assert "12 layers" in messages(x)["pipeline.offset-broadcast"]
    assert sum(map(sum, place_layers(10, 2, 2, [1, 1]))) == 10


def test_recompute_lists_mean_what_layer_setting_makes_of_them(mcore):
    from mindferry.planning.fromlayout import _full_layers

    for value in (True, False, [3, 1], [1], [True, 0], [[2, 1], [0, 1]], [[True, False], [1, 1]]):
        setting = layer_setting(mcore, 12, 2, 2, 0, recompute=value)
        assert _full_layers(value, setting.layer_list.tolist()) == tuple(
            np.sum(setting.layer_recompute, axis=0)
        )


def test_default_select_patterns_touch_nothing_in_a_plain_mlp(mcore):
    setting = layer_setting(mcore, 4, 1, 1, 0)
    assert set(setting.select_recompute) >= {r"mlp\.mul", r"mlp\.activation_func\.silu"}
    x = layout(select_recompute=True)
    assert "recompute.select-nothing" in messages(x, "warning")
    assert "recompute.select-nothing" not in messages(
        layout(select_recompute=True, gated_linear_unit=True), "warning"
    )


# ---- check_rules ------------------------------------------------------------------------------------------------


def their_rules(mcore, monkeypatch, x):
    monkeypatch.setattr(mcore.check_rules, "get_device_num", lambda: x.devices)
    monkeypatch.setattr(mcore.check_rules, "get_server_num", lambda: -(-x.devices // x.devices_per_host))
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel=x.data_parallel, model_parallel=x.model_parallel, context_parallel=x.context_parallel,
            pipeline_stage=x.pipeline_stage, use_seq_parallel=x.use_seq_parallel, seq_split_num=x.seq_split_num,
            context_parallel_algo=SimpleNamespace(value=x.context_parallel_algo),
        ),
        parallel=SimpleNamespace(
            enable_parallel_optimizer=x.enable_parallel_optimizer,
            pipeline_config=SimpleNamespace(pipeline_scheduler=x.pipeline_scheduler),
        ),
        recompute_config=SimpleNamespace(
            recompute=x.recompute, select_recompute=x.select_recompute, select_comm_recompute=x.select_comm_recompute
        ),
        swap_config=SimpleNamespace(swap=False),
        moe_config=SimpleNamespace(expert_num=x.num_experts),
        model=SimpleNamespace(
            model_config=SimpleNamespace(
                use_flash_attention=x.use_flash_attention, vocab_size=x.vocab_size, hidden_size=x.hidden_size,
                num_heads=x.num_attention_heads, fine_grain_interleave=x.fine_grain_interleave,
            )
        ),
    )  # fmt: skip
    rules = mcore.check_rules
    for part in (rules._check_parallel, rules._check_recompute, rules._check_config_campacity):
        text = raised(lambda part=part: part(config))
        if text:
            return text
    return None


RULE_CASES = [
    {"devices": 8, "data_parallel": 2, "model_parallel": 4, "pipeline_stage": 2},
    {
        "devices": 8,
        "data_parallel": 2,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "micro_batch_num": 4,
        "vocab_size": 50304,
    },
    {"devices": 2, "context_parallel": 2, "use_flash_attention": False},
    {"devices": 16, "context_parallel": 16, "context_parallel_algo": "ulysses_cp"},
    {"devices": 2, "model_parallel": 2, "num_experts": 4, "vocab_size": 50304},
    {"devices": 2, "pipeline_stage": 2, "micro_batch_num": 2, "recompute": [1, 2, 3]},
    {"devices": 2, "pipeline_stage": 2, "micro_batch_num": 2, "select_recompute": [1, 2, 3]},
    {"fine_grain_interleave": 2},
    {"devices": 2, "pipeline_stage": 2, "micro_batch_num": 2, "pipeline_scheduler": "seqvpp"},
]


@pytest.mark.parametrize("changes", RULE_CASES)
def test_check_rules_raises_what_we_say(mcore, monkeypatch, changes):
    x = layout(**changes)
    theirs = their_rules(mcore, monkeypatch, x)
    ours = [words(m) for m in messages(x).values()]
    if theirs is None:
        assert ours == []
    else:
        assert theirs in ours


def test_degrees_agree_with_check_rules_on_many_cuts(mcore, monkeypatch):
    for n in (1, 6, 8, 12, 24, 40):
        for t in (1, 2, 3, 4):
            for p in (1, 2, 3):
                for d in (1, 2, 4, 6):
                    x = layout(
                        devices=n, data_parallel=d, model_parallel=t, pipeline_stage=p, micro_batch_num=12
                    )
                    theirs = their_rules(mcore, monkeypatch, x)
                    assert messages(x).get("devices.product") == theirs


def test_optimizer_config_is_refused_as_mindspore_does(mindformers):
    ms = mindformers.ms
    for config in ({"optimizer_level": "level4"}, {"optimizer_level": "level1", "gradient_accumulation_shard": True},
                   {"shard": 1}, {"optimizer_level": "level2"}):  # fmt: skip
        ms.reset_auto_parallel_context()
        theirs = raised(lambda config=config: ms.set_auto_parallel_context(parallel_optimizer_config=config))
        ms.reset_auto_parallel_context()
        ours = messages(
            layout(
                devices=2, data_parallel=2, enable_parallel_optimizer=True, parallel_optimizer_config=config
            )
        )
        assert (theirs is None) == ("optimizer.config" not in ours)
        if theirs:
            assert words(ours["optimizer.config"]) == theirs


# ---- faults people reported --------------------------------------------------------------------------------------


def test_thirty_layers_on_four_stages_keep_all_layers():
    # NVIDIA/Megatron-LM#1304: 28 of 30 layers trained without a word
    assert even_layers(30, 4) == ((7, 8, 8, 7),)
    assert even_layers(10, 3) == ((3, 4, 3),)
    x = layout(num_layers=30, pipeline_stage=4, devices=4, micro_batch_num=4, offset=[0, 1, 1, 0])
    assert messages(x) == {}
    x.offset = 0
    assert "(30) % (pp (4) * pp_interleave_num (1)) = 2" in messages(x)["pipeline.offset"]
    x.use_legacy, x.offset = True, [0, 1, 1, 0]
    assert "pipeline.offset-legacy" in messages(x)
    assert "pipeline.layers" in messages(layout(num_layers=3, pipeline_stage=4, devices=4, micro_batch_num=4))


def test_fewer_micro_batches_than_stages_are_refused_with_the_minimum():
    # pytorch/torchtitan#775: the run hangs
    broken = [v for v in constraints.check(layout(pipeline_stage=4, devices=4, micro_batch_num=2))
              if v.rule == "pipeline.micro_batches"]  # fmt: skip
    assert "micro_batch_num at least 4" in broken[0].remedy
    assert "graph is compiled" in broken[0].when
    assert "pipeline.micro_batches" not in messages(layout(pipeline_stage=4, devices=4, micro_batch_num=4))
    x = layout(pipeline_stage=4, devices=8, data_parallel=2, micro_batch_num=8)
    assert x.effective_batch == 16
    x.micro_batch_num, x.global_batch = 6, 12
    assert "batch.global" not in messages(x)
    x.global_batch = 9
    assert "batch.global" in messages(x)


def test_cards_against_degrees():
    # NVIDIA-NeMo/Speech#11480
    x = layout(
        devices=8, data_parallel=2, model_parallel=4, pipeline_stage=2, vocab_size=50304, micro_batch_num=2
    )
    item = next(v for v in constraints.check(x) if v.rule == "devices.product")
    assert "2*4*1*2 = 16 != device_num(8)" in item.message
    assert "data_parallel 1" in item.remedy
    x = layout(devices=6, model_parallel=4, vocab_size=50304)
    assert "[1, 2, 3, 6]" in next(v for v in constraints.check(x) if v.rule == "devices.product").remedy
    assert "devices.product" in messages(layout(devices=1, model_parallel=2, vocab_size=50304))


def test_gpt2s_odd_vocabulary():
    for legacy in (False, True):
        x = layout(devices=4, model_parallel=2, pipeline_stage=2, micro_batch_num=4, use_legacy=legacy)
        assert "50257" in messages(x)["vocab.model_parallel"]
        assert (
            "50304 (47 unused rows, 36,096 parameters)"
            in next(v for v in constraints.check(x) if v.rule == "vocab.model_parallel").remedy
        )
    alone = layout(devices=2, model_parallel=2, use_legacy=True, vocab_emb_dp=True)
    assert "vocab.model_parallel" not in messages(alone)
    assert padded_vocab(50257, 1) == 50257
    for t in (2, 3, 4, 5, 8, 25):
        padded = padded_vocab(50257, t)
        assert padded % t == 0
        assert padded >= 50257
    assert [padded_vocab(50257, t) for t in (2, 4, 8)] == [50304] * 3


def test_settings_that_mindformers_resets_are_warned_of():
    x = layout(devices=2, pipeline_stage=2, micro_batch_num=2, vocab_emb_dp=True, use_legacy=True)
    assert (
        messages(x, "warning")["vocab.emb_dp"]
        == "pipeline_stage = 2 > 1, vocab_emb_dp will be reset to False."
    )
    assert "converted to False" in messages(layout(vocab_emb_dp=True), "warning")["vocab.emb_dp"]
    x = layout(micro_batch_num=4)
    assert "Reset it to 1." in messages(x, "warning")["batch.ignored"]
    assert x.micro_batches == 1
    x = layout(devices=4, pipeline_stage=4, micro_batch_num=8, gradient_accumulation_steps=4)
    assert "from 4 to 1" in messages(x, "warning")["batch.ignored"]
    assert x.micro_batches == 8
    x = layout(devices=2, data_parallel=2, parallel_mode=0, gradient_accumulation_steps=4)
    assert "but got data_parallel mode" in messages(x, "warning")["batch.ignored"]
    assert x.effective_batch == 2
    assert "parallel.mode" in messages(layout(devices=4, model_parallel=4, vocab_size=50304, parallel_mode=0))


def test_several_processes_without_use_parallel_train_alone():
    assert "parallel.off" in messages(layout(devices=8, use_parallel=False))
    assert messages(layout(devices=1, use_parallel=False)) == {}


def test_power_of_two_devices_are_a_warning_not_an_error():
    # mindspore#75: the automatic search wants a power of two
    for n in (6, 12, 40):
        x = layout(devices=n, data_parallel=n)
        assert messages(x) == {}
    assert "devices.power-of-two" in messages(layout(devices=6, data_parallel=6), "warning")
    assert "devices.power-of-two" in messages(layout(devices=12, data_parallel=12), "warning")
    assert "devices.power-of-two" not in messages(layout(devices=24, data_parallel=24), "warning")
    assert "devices.power-of-two" in messages(
        layout(devices=24, data_parallel=24, parallel_mode=2), "warning"
    )


@pytest.mark.parametrize(
    "name", ["data_parallel", "pipeline_stage", "micro_batch_num", "batch_size", "devices"]
)
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2", None])
def test_impossible_degrees_end_the_check(name, value):
    assert list(messages(layout(**{name: value}))) == ["degrees.positive"]


def test_any_layout_is_checked_without_a_crash():
    whole = hs.one_of(hs.integers(-2, 70), hs.none(), hs.text(max_size=2), hs.booleans(), hs.floats())
    anything = hs.recursive(whole, lambda inner: hs.lists(inner, max_size=4), max_leaves=6)

    @settings(max_examples=300, deadline=None)
    @given(hs.fixed_dictionaries({}, optional={
        "devices": whole, "data_parallel": whole, "model_parallel": whole, "pipeline_stage": whole,
        "context_parallel": whole, "micro_batch_num": whole, "pp_interleave_num": whole, "offset": anything,
        "recompute": anything, "dataset_strategy": anything, "full_batch": hs.booleans(),
        "seq_split_num": whole, "ulysses_degree_in_cp": whole, "fine_grain_interleave": whole,
        "micro_batch_interleave_num": whole, "use_seq_parallel": hs.booleans(), "pipeline_interleave": hs.booleans(),
        "enable_parallel_optimizer": hs.booleans(), "use_legacy": hs.booleans(), "parallel_mode": whole,
    }))  # fmt: skip
    def run(changes):
        for item in constraints.check(layout(**changes)):
            assert item.message
            assert item.rule

    run()
