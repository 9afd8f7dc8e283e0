"""A run of any attention and residual as a model of transformers. It is part of what `sample.py --export` writes.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

transformers imports this file from the exported folder, next to model.py. Nothing here imports it.
"""

from dataclasses import fields

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from .model import GPT, GPTConfig


class GPTVariantConfig(PreTrainedConfig):
    """The fields of a GPTConfig, and the names that transformers has for some of them."""

    model_type = "gpt_variant"
    attribute_map = {
        "max_position_embeddings": "block_size",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "tie_word_embeddings": "tie_weights",
    }

    def __init__(self, **options):
        for field in fields(GPTConfig):
            setattr(self, field.name, options.pop(field.name, field.default))
        super().__init__(**options)


class GPTVariantForCausalLM(PreTrainedModel, GenerationMixin):
    """A GPT that takes and returns what transformers' language models do.

    A batch may be padded on the right. `generate` appends to the rows, so they must have equal length or come one
    at a time. It has no KV cache: each token rereads the last block_size tokens.
    """

    config_class = GPTVariantConfig
    base_model_prefix = "gpt"
    _tied_weights_keys = {"gpt.head.weight": "gpt.embed.weight"}  # if config.tie_weights
    _no_split_modules = ["GPT"]  # layers recompute one another, so they are on one device

    def __init__(self, config):
        super().__init__(config)
        self.gpt = GPT(GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)}))
        self.post_init()

    def get_input_embeddings(self):
        return self.gpt.embed

    def get_output_embeddings(self):
        return self.gpt.head

    @property
    def base_model(self):
        """The model without its head, for trl, which applies the head itself."""
        return self.hidden_states

    def hidden_states(self, input_ids, attention_mask=None, **options):
        check_inputs(attention_mask, options)
        return BaseModelOutput(self.gpt.features(input_ids))

    def forward(
        self, input_ids, attention_mask=None, labels=None, return_dict=None, num_items_in_batch=None, **options
    ):
        """Return logits (B, T, V) for input_ids (B, T) and, with labels (B, T), their mean cross-entropy in nats.

        The labels are the input_ids: each is compared with the logits of the token before it. -100 is ignored. A mask
        may have zeros at the end of a row only: no earlier token sees what is there, so they change nothing.
        Raises ValueError for any other mask, a T that is longer than block_size, and any other option that is given.
        """
        check_inputs(attention_mask, options)
        logits, _ = self.gpt(input_ids)
        loss = None
        if labels is not None:
            sizes = {"vocab_size": self.config.vocab_size, "num_items_in_batch": num_items_in_batch}
            loss = self.loss_function(logits=logits, labels=labels, **sizes)
        output = CausalLMOutput(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **options):
        """Return what `forward` needs for the next token: the last block_size tokens."""
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("to generate, give texts of one length, without padding, or one text at a time")
        return {"input_ids": input_ids[:, -self.config.block_size :]}


def check_inputs(attention_mask, options):
    """Raise a ValueError for what the model would otherwise ignore."""
    if attention_mask is not None and (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
        raise ValueError("attention_mask has a 0 before a 1: set tokenizer.padding_side = 'right'")
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{given[0]} is not supported: leave it out")


GPTVariantConfig.register_for_auto_class()  # so that save_pretrained copies this file and model.py
GPTVariantForCausalLM.register_for_auto_class("AutoModelForCausalLM")
