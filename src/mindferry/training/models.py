"""GPT-class models for mindformers 1.9.0, registered through its own registry: GPT2Config, GPT2ForTraining, ...

mindformers dropped its GPT-2 after 1.3.2, and trains no plain Llama, Mistral or Qwen2 on today's `GPTModel`. These
classes put them on it. Import this module (or name it with mindformers' `--register_path`) and a YAML with
`type: GPT2Config` and `arch.type: GPT2ForTraining` builds. `GPT2LMHeadModel`, the name of 1.3.2, is accepted too.
"""

from __future__ import annotations

import mindspore as ms
from mindformers.models.configuration_utils import PretrainedConfig
from mindformers.models.modeling_utils import PreTrainedModel
from mindformers.models.utils import convert_mstype
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.transformer_config_utils import convert_to_transformer_config
from mindformers.parallel_core.utils.model_mixin import ModelMixin, TrainModelMixin
from mindformers.tools.logger import logger
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore.communication import get_group_size

from mindferry.errors import UsageError
from mindferry.layers.portable import PortableDropout, make_portable, portable_layer_spec
from mindferry.layers.rotary import rotary_tables
from mindferry.targets.model_keys import DEFAULTS, canonical, transformer_keys
from mindferry.targets.run_yaml import ARCHITECTURES


class GPTConfig(PretrainedConfig):
    """Configuration of a GPT-class model on mindformers' GPTModel.

    Keys, aliases (the article's num_heads, embed_dim, dropout_prob among them) and defaults are declared in
    mindferry.targets.model_keys. mindformers itself adds parallel_config and dataset_config.

    Raises:
        UsageError: an unknown key (the nearest known one is named), or two aliases with different values.
    """

    model_type = "mindferry_gpt"

    def __init__(self, **kwargs):
        own, base = canonical(kwargs)
        super().__init__(**base)
        for key, value in {**DEFAULTS, **own}.items():
            setattr(self, key, value)

    def convert_to_transformer_config(self, is_mla_model=False):
        """Return mindformers' TransformerConfig; unknown keys raise there too."""
        values = transformer_keys({key: getattr(self, key) for key in DEFAULTS})
        values["parallel_config"] = self.to_dict().get("parallel_config", {})
        config = convert_to_transformer_config(values)
        # mindformers' table maps this key to a yes/no only; the dtype itself has no key there.
        config.softmax_compute_dtype = convert_mstype(self.softmax_compute_type)
        if ms.get_auto_parallel_context("parallel_mode") == "data_parallel":
            # mindformers resets parallel_config outside automatic parallelism, then misses the processes.
            config.data_parallel_size = get_group_size()
            # Lazy inlining serves pipelines; where our wrapper takes the gradient the CPU backend cannot compile it.
            config.disable_lazy_inline = True
        return config


def _rotary(settings, config):
    """Tables for the rotary positions of `settings`; None for a model without."""
    if settings.position_embedding_type != "rope":
        return None
    return rotary_tables(
        seq_length=config.seq_length,
        dim=int(config.kv_channels * settings.rotary_percent),
        base=settings.rotary_base,
        scaling=settings.rope_scaling,
        max_position_embeddings=config.max_position_embeddings,
    )


def check_reference(settings) -> None:
    """What mindformers' own modules cannot compute is refused: they would train another model.

    Raises:
        UsageError: the setting and the way out.
    """
    if settings.layer_spec != "reference":
        return
    for key, plain in (("rope_scaling", None), ("parallel_residual", False)):
        if getattr(settings, key) != plain:
            raise UsageError(
                f"model_config.{key}: mindformers 1.9.0's own layers do not know it",
                remedy="use layer_spec: portable",
                id="layer-spec.unsupported",
            )
    if settings.activation not in ("gelu_tanh", "silu"):
        raise UsageError(
            f"model_config.activation: mindformers 1.9.0's own layers have no {settings.activation}",
            remedy="use layer_spec: portable",
            id="layer-spec.unsupported",
        )


def _fused_works(config, settings) -> bool:
    """Whether the fused layers can be used; a warning says why when not."""
    from mindferry.layers.fused import why_not

    reason = why_not(config, settings.activation)
    if reason:
        logger.warning(f"layer_spec fused is not available, using portable: {reason}")
    return not reason


class GPTForTraining(TrainModelMixin, PreTrainedModel, ModelMixin):
    """A GPT-class model for training: mindformers' GPTModel with the layer spec that the configuration names.

    Inputs (int32): input_ids, labels (shifted by one), position_ids, each [B, S]; loss_mask [B, S].
    Output in training: loss, mtp_loss, extra_loss, attention_loss (the last three zero), as mindformers'
    step wrapper expects; in evaluation: logits [B*S, vocab_size] float32.
    """

    config_class = GPTConfig
    base_model_prefix = "gpt"
    # mindformers renames Hugging Face keys on loading where a table is given; run/model/ has its names already.
    weight_mapping = ()

    def __init__(self, config: GPTConfig):
        super().__init__(config, auto_prefix=False)
        settings = self.config
        transformer_config = self.convert_to_transformer_config(settings)
        portable = settings.layer_spec != "reference"
        check_reference(settings)
        rotary = _rotary(settings, transformer_config) if portable else None
        fused = settings.layer_spec == "fused" and _fused_works(transformer_config, settings)
        if fused:
            from mindferry.layers.fused import FusedGPTModel, fused_layer_spec, make_fused

            model_class = FusedGPTModel
            spec = fused_layer_spec(
                transformer_config,
                settings.activation,
                rotary[0].shape[1] if rotary else 0,
                settings.parallel_residual,
            )
        elif portable:
            model_class = GPTModel
            spec = portable_layer_spec(transformer_config, settings.activation, settings.parallel_residual)
        else:
            model_class = GPTModel
            spec = get_gpt_layer_local_spec(
                qk_layernorm=settings.qk_layernorm,
                fused_norm=True,
                use_contiguous_weight_layout_attention=transformer_config.use_contiguous_weight_layout_attention,
                use_interleaved_weight_layout_mlp=transformer_config.use_interleaved_weight_layout_mlp,
            )
        self.model = model_class(
            config=transformer_config,
            transformer_layer_spec=spec,
            vocab_size=transformer_config.vocab_size,
            max_sequence_length=transformer_config.max_position_embeddings,
            position_embedding_type=settings.position_embedding_type,
            rotary_percent=settings.rotary_percent,
            rotary_base=settings.rotary_base,
            share_embeddings_and_output_weights=settings.tie_word_embeddings,
        )
        if not settings.trainable_norm_bias:
            # mindformers' LayerNorm always has a bias; a source without one must not learn one.
            for parameter in self.model.get_parameters():
                if parameter.name.endswith(".beta"):
                    parameter.requires_grad = False
        if fused:
            make_fused(self.model, transformer_config, settings.embedding_dropout, rotary)
        elif portable:
            make_portable(self.model, rotary)
            embedding = self.model.embedding
            embedding.embedding_dropout_prob = settings.embedding_dropout
            embedding.embedding_dropout = PortableDropout(settings.embedding_dropout)

    def construct(
        self,
        input_ids,
        position_ids=None,
        attention_mask=None,
        decoder_input=None,
        labels=None,
        extra_block_kwargs=None,
        prefix_keys_values=None,
        loss_mask=None,
        actual_seq_len=None,
    ):
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            decoder_input=decoder_input,
            labels=labels,
            extra_block_kwargs=extra_block_kwargs,
            prefix_keys_values=prefix_keys_values,
            loss_mask=loss_mask,
            actual_seq_len=actual_seq_len,
        )


def _register_families() -> None:
    """One configuration and one network class for each family of run_yaml.ARCHITECTURES."""
    for config_name, network_name, model_type in ARCHITECTURES.values():
        config = type(config_name, (GPTConfig,), {"model_type": model_type, "__module__": __name__})
        network = type(
            network_name,
            (GPTForTraining,),
            {"config_class": config, "base_model_prefix": model_type, "__module__": __name__},
        )
        globals().update({config_name: config, network_name: network})
        other_names = OLD_NAMES.get(network_name, ())
        MindFormerRegister.register(
            MindFormerModuleType.CONFIG, legacy=False, search_names=(model_type, config_name)
        )(config)
        MindFormerRegister.register(
            MindFormerModuleType.MODELS, legacy=False, search_names=(network_name, *other_names)
        )(network)


# Names that mindformers had for a network before.
OLD_NAMES = {"GPT2ForTraining": ("GPT2LMHeadModel",)}

_register_families()
