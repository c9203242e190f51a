"""The key table of model_config: aliases, conflicts, and mindformers' real defaults."""

from __future__ import annotations

from dataclasses import fields

import pytest

from mindferry.errors import UsageError
from mindferry.targets import model_keys


def test_the_articles_example_is_understood() -> None:
    ours, base = model_keys.canonical(
        {
            "type": "GPT2Config",
            "vocab_size": 50257,
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "seq_length": 1024,
            "embed_dim": 768,
            "dropout_prob": 0.1,
            "compute_dtype": "float16",
            "layernorm_compute_type": "float32",
            "softmax_compute_type": "float32",
            "param_init_type": "float32",
        }
    )
    assert base == {"type": "GPT2Config"}
    assert ours["hidden_size"] == 768
    assert [ours[f"{part}_dropout"] for part in ("embedding", "hidden", "attention")] == [0.1] * 3


def test_two_spellings_of_one_key_must_agree() -> None:
    assert model_keys.canonical({"num_heads": 4, "n_head": 4})[0] == {"num_heads": 4}
    with pytest.raises(UsageError, match=r"'num_heads' and 'n_head' are one setting, found 4 and 8"):
        model_keys.canonical({"num_heads": 4, "n_head": 8})


@pytest.mark.parametrize(
    ("typo", "meant"), [("hiden_size", "hidden_size"), ("layernorm_epsilonn", "layernorm_epsilon")]
)
def test_an_unknown_key_names_the_nearest(typo: str, meant: str) -> None:
    with pytest.raises(UsageError, match="unknown key") as caught:
        model_keys.canonical({typo: 1})
    assert repr(meant) in caught.value.remedy


def test_hidden_act_takes_mindformers_words_only() -> None:
    """mindformers' `gelu` is the tanh form, Hugging Face's the exact one: the word alone is refused."""
    assert model_keys.canonical({"hidden_act": "gelu"})[0] == {"activation": "gelu_tanh"}
    with pytest.raises(UsageError, match="gelu_new"):
        model_keys.canonical({"hidden_act": "gelu_new"})


def test_declared_defaults_are_those_of_the_real_class() -> None:
    from mindformers.parallel_core.transformer_config import TransformerConfig

    real = {field.name: field.default for field in fields(TransformerConfig)}
    for key, default in model_keys.MINDFORMERS_DEFAULTS.items():
        assert real[key] == default, key


def test_every_target_is_a_field_of_the_real_class() -> None:
    from mindformers.parallel_core.transformer_config import TransformerConfig

    real = {field.name for field in fields(TransformerConfig)}
    assert {key.target for key in model_keys.KEYS if key.target} <= real
