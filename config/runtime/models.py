"""A run's model: from its settings, from its checkpoint, or from the weights of another one."""

import re
from dataclasses import fields

from config.runtime.errors import UserError
from model import GPT, ConfigError, GPTConfig

# settings that always come from the model that another one begins from, and those that never do
SHAPE = {"n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights"}
NOT_INHERITED = {"block_size", "dropout"}
OWN = r"\.attn\.(?!\w+_proj\.)"  # weights of an attention kind that others do not have
# weights that mean something else under another value of a setting, in spite of the same name and shape
MEANING = {"attention": OWN, "w2_score": OWN, "qk_scale": r"\.attn\.(log_a|a|b)$", "residual": r"\.mix$"}


def of_model(settings) -> dict:
    """Return the settings that are fields of a GPTConfig."""
    return {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}


def make_config(settings, **others) -> GPTConfig:
    """Return the shape and the method of the settings' model, and `others` where the settings have no such field."""
    try:
        return GPTConfig(**others | of_model(settings))
    except ConfigError as error:
        raise UserError(error) from None


def config_of(checkpoint) -> GPTConfig:
    try:
        return GPTConfig(**checkpoint["config"])
    except (TypeError, ValueError) as error:  # says which field model.py lacks
        raise UserError(f"{checkpoint['path']} does not match this model.py: {error}") from None


def build_model(checkpoint) -> GPT:
    model = GPT(config_of(checkpoint))
    load_weights(model, checkpoint["model"], checkpoint["path"])
    return model


def load_weights(model, weights, owner):
    """Copy `weights`, which must be all of a model's and no others, into `model`."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # says which are missing, unexpected or of another size
        problem = " ".join(str(error).split())
        raise UserError(f"{owner} does not match this model.py: {problem:.300}") from None


def begin_from(source, settings, given):
    """Return a model with the weights of `source`, another run's checkpoint, and a note that lists new ones.

    What is inherited from its config goes into `settings`: the shape in any case, the rest unless it is given.
    A weight is kept if both models have it, in the same shape and meaning.
    """
    old = config_of(source)
    inherited = settings.keys() & source["config"].keys() - NOT_INHERITED - (given.keys() - SHAPE)
    settings |= {name: getattr(old, name) for name in inherited}
    model = GPT(make_config(settings, **source["config"]))
    differing = [name for name in MEANING if getattr(old, name) != getattr(model.config, name)]
    kept, new = {}, set()
    for name, tensor in model.state_dict().items():
        found = source["model"].get(name)
        other_meaning = any(re.search(MEANING[setting], name) for setting in differing)
        if found is None or found.shape != tensor.shape or other_meaning:
            new.add(re.sub(r"\.\d+\.", ".*.", name))
        else:
            kept[name] = found
    model.load_state_dict(kept, strict=False)
    notes = [f"new weights, not from {settings['init_from']}: {', '.join(sorted(new))}"] if new else []
    return model, notes
