"""GPT2Config and GPT2ForTraining in mindformers' own registry, and the parameter tree of every layer spec."""

from __future__ import annotations

import pytest

from mindferry.errors import UsageError

from ..support import gpt2_spec


@pytest.fixture(scope="module", autouse=True)
def context() -> None:
    """mindformers' context says `use_legacy: False`; without one it builds its old models."""
    from mindformers.core.context.build_context import build_context
    from mindformers.tools.register import MindFormerConfig

    build_context(
        MindFormerConfig(
            use_legacy=False,
            run_mode="train",
            use_parallel=False,
            context={"mode": 0, "device_target": "CPU"},
            parallel={},
        )
    )


SMALL = {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "seq_length": 8}


def build(arch: str = "GPT2ForTraining", **config):  # type: ignore[no-untyped-def]
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.build_model import build_network
    from mindformers.tools.register import MindFormerConfig

    import mindferry.training.models  # noqa: F401

    whole = MindFormerConfig(
        model={
            "model_config": {
                "type": "GPT2Config",
                "model_type": "gpt2",
                "architectures": [arch],
                **SMALL,
                **config,
            }
        },
        use_legacy=False,
    )
    build_parallel_config(whole)
    return build_network(
        whole.model, default_args={"parallel_config": whole.parallel_config, "moe_config": whole.moe_config}
    )


@pytest.mark.parametrize("arch", ["GPT2ForTraining", "GPT2LMHeadModel"])
def test_both_names_build_the_same_class(arch: str) -> None:
    assert type(build(arch)).__name__ == "GPT2ForTraining"


@pytest.mark.parametrize("tied", [True, False])
def test_reference_and_portable_have_one_parameter_tree(tied: bool) -> None:
    """mindformers' own modules can be built anywhere; only running them needs an Ascend device."""
    trees = [
        {p.name: tuple(p.shape) for p in build(layer_spec=spec, tie_word_embeddings=tied).get_parameters()}
        for spec in ("portable", "reference")
    ]
    assert trees[0] == trees[1]
    assert ("output_layer.weight" in trees[0]) is not tied


def test_the_tree_is_what_weights_are_converted_to() -> None:
    from mindferry.weights import target_names

    spec = gpt2_spec()
    network = build(tie_word_embeddings=False)
    parameters = {p.name: tuple(p.shape) for p in network.get_parameters()}
    assert parameters == {name: tuple(shape) for name, shape in target_names(spec).items()}
    assert sum(p.size for p in network.get_parameters()) == spec.num_parameters()


def test_settings_reach_the_network() -> None:
    network = build(embedding_dropout=0.3, hidden_dropout=0.2, attention_dropout=0.1, layernorm_epsilon=1e-3)
    model = network.get_gpt_model()
    assert model.embedding.embedding_dropout_prob == 0.3
    assert model.config.hidden_dropout == 0.2
    assert model.config.attention_dropout == 0.1
    assert model.decoder.final_layernorm.eps == 1e-3
    assert model.decoder.layers[0].input_layernorm.eps == 1e-3


def test_an_unknown_key_is_an_error() -> None:
    """mindformers 1.9 itself lets such keys pass."""
    with pytest.raises(UsageError, match="unknown key 'num_hedas'") as caught:
        build(num_hedas=4)
    assert "num_heads" in str(caught.value)
