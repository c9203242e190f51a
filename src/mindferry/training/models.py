"""GPT2Config and GPT2ForTraining: GPT-2 for mindformers 1.9.0, registered through its own registry.

mindformers dropped its GPT-2 after 1.3.2. These two classes put it back on today's `GPTModel`. Import this
module (or name it with mindformers' `--register_path`) and a YAML with `type: GPT2Config` and
`arch.type: GPT2ForTraining` builds. `GPT2LMHeadModel`, the name of 1.3.2, is accepted for the same class.
"""

from __future__ import annotations

from mindformers.models.configuration_utils import PretrainedConfig
from mindformers.models.modeling_utils import PreTrainedModel
from mindformers.models.utils import convert_mstype
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
from mindformers.parallel_core.transformer_config_utils import convert_to_transformer_config
from mindformers.parallel_core.utils.model_mixin import ModelMixin, TrainModelMixin
from mindformers.tools.logger import logger
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

from mindferry.layers.portable import PortableDropout, make_portable, portable_layer_spec
from mindferry.targets.model_keys import DEFAULTS, canonical, transformer_keys


@MindFormerRegister.register(
    MindFormerModuleType.CONFIG, legacy=False, search_names=("gpt2", "gpt2forcausallm", "GPT2Config")
)
class GPT2Config(PretrainedConfig):
    """Configuration of GPT-2 on mindformers' GPTModel.

    Keys, aliases (the article's num_heads, embed_dim, dropout_prob among them) and defaults are declared in
    mindferry.targets.model_keys. mindformers itself adds parallel_config and dataset_config.

    Raises:
        UsageError: an unknown key (the nearest known one is named), or two aliases with different values.
    """

    model_type = "gpt2"

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
        return config


def _fused_works(config, activation) -> bool:
    """Whether the fused layers can be used; a warning says why when not."""
    from mindferry.layers.fused import why_not

    reason = why_not(config, activation)
    if reason:
        logger.warning(f"layer_spec fused is not available, using portable: {reason}")
    return not reason


@MindFormerRegister.register(
    MindFormerModuleType.MODELS, legacy=False, search_names=("GPT2ForTraining", "GPT2LMHeadModel")
)
class GPT2ForTraining(TrainModelMixin, PreTrainedModel, ModelMixin):
    """GPT-2 for training: mindformers' GPTModel with the layer spec that the configuration names.

    Inputs (int32): input_ids, labels (shifted by one), position_ids, each [B, S]; loss_mask [B, S].
    Output in training: loss, mtp_loss, extra_loss, attention_loss (the last three zero), as mindformers'
    step wrapper expects; in evaluation: logits [B*S, vocab_size] float32.
    """

    config_class = GPT2Config
    base_model_prefix = "gpt2"
    # mindformers renames Hugging Face keys on loading where a table is given; run/model/ has its names already.
    weight_mapping = ()

    def __init__(self, config: GPT2Config):
        super().__init__(config, auto_prefix=False)
        settings = self.config
        transformer_config = self.convert_to_transformer_config(settings)
        portable = settings.layer_spec != "reference"
        fused = settings.layer_spec == "fused" and _fused_works(transformer_config, settings.activation)
        if fused:
            from mindferry.layers.fused import FusedGPTModel, fused_layer_spec, make_fused

            model_class = FusedGPTModel
            spec = fused_layer_spec(transformer_config, settings.activation)
        elif portable:
            model_class = GPTModel
            spec = portable_layer_spec(transformer_config, settings.activation)
        else:
            model_class = GPTModel
            spec = get_gpt_layer_local_spec(
                fused_norm=True,
                use_contiguous_weight_layout_attention=transformer_config.use_contiguous_weight_layout_attention,
                use_interleaved_weight_layout_mlp=transformer_config.use_interleaved_weight_layout_mlp,
            )
        self.model = model_class(
            config=transformer_config,
            transformer_layer_spec=spec,
            vocab_size=transformer_config.vocab_size,
            max_sequence_length=transformer_config.max_position_embeddings,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=settings.tie_word_embeddings,
        )
        if fused:
            make_fused(self.model, transformer_config, settings.embedding_dropout)
        elif portable:
            make_portable(self.model)
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
