"""Tiny configurations of every family of transformers, and inputs for their models."""

import inspect
import json
import re
from pathlib import Path

import torch
from transformers import PreTrainedConfig

LENGTH = 17
_VOCABULARY = 99
_OPTIONS = json.loads(Path(__file__).with_name("tiny_options.json").read_text())
_SIZES = _OPTIONS["sizes"]
"""Option -> value, for configurations that have the option."""
_EVEN_IF_NONE = {
    *("head_dim", "num_key_value_heads", "vocab_size", "moe_intermediate_size"),
    *("num_experts_per_tok", "n_routed_experts"),
}
_RULES = (
    (r"token_(id|index)$", _VOCABULARY - 1, None),
    (r"vocab", _VOCABULARY, _VOCABULARY),
    (r"(?<!extract_)layers|depth|num_blocks|(^|_)n_layer$|_layer$", 2, 2),
    (r"heads?$", 2, 2),
    (r"position", 64, 64),
    (
        r"hidden|dim|size|ffn|inner|width|channels|embd|dff|embed|rank|d_ff|mlp|expansion|feature",
        64,
        32,
    ),
    (r"experts", 4, 4),
)
"""Pattern of an option, the largest value that stays, and the value of others."""


def make_config(kind, are_sizes_ruled=True):
    """Return a tiny configuration.

    Args:
        kind: The class.
        are_sizes_ruled: Whether other options than those of ``_SIZES`` become small by ``_RULES``.
    """
    return kind(**_options_of(kind, are_sizes_ruled))


def _options_of(kind, are_sizes_ruled):
    try:
        default = kind()
        values = vars(default)
    except Exception:  # a configuration that requires another one
        default = None
        parameters = inspect.signature(kind.__init__).parameters
        values = {name: each.default for name, each in parameters.items()}
    parts = getattr(kind, "sub_configs", {})
    layers = max([3, *(each for each in map(values.get, _LAYERS) if isinstance(each, int))])
    options = {}
    for name, value in values.items():
        if name.startswith("_") or name in parts:
            continue
        small = _shrink(name, value, layers, are_sizes_ruled)
        if small is not None:
            options[name] = small
    if "qk_rope_head_dim" in values and "head_dim" in options:
        options["head_dim"] = 8
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict) and "mrope_section" in str(values[name]):
            options[name] = _with_sections(values[name])
            break
    is_timm = type(values.get("backbone_config")).__name__.startswith("Timm")
    if "use_timm_backbone" in values or is_timm:
        options["backbone_config"] = dict(_OPTIONS["backbone"])
        parts = {name: part for name, part in parts.items() if name != "backbone_config"}
        if "use_timm_backbone" in values:
            options["use_timm_backbone"] = False
    for name, part in parts.items():
        given = getattr(default, name, None)
        if isinstance(given, PreTrainedConfig):
            part = type(given)
        is_known = isinstance(part, type) and issubclass(part, PreTrainedConfig)
        if not is_known or part is PreTrainedConfig:
            continue
        options[name] = _options_of(part, are_sizes_ruled)
        if isinstance(given, PreTrainedConfig) and given.model_type:
            options[name]["model_type"] = given.model_type
    for name, value in _OPTIONS["configurations"].get(kind.__name__, {}).items():
        options[name] = options.get(name, {}) | value if name in parts else value
    return options


_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def _shrink(name, value, layers, are_sizes_ruled):
    """Return a smaller value of an option, ``None`` to leave it."""
    if name in _SIZES and (name in _EVEN_IF_NONE if value is None else type(value) is int):
        return _SIZES[name]
    if isinstance(value, (list, tuple)):
        if len(value) == layers > 4:  # one for each layer
            return list(value[-2:] if "types" in name else value[:2])
        if not are_sizes_ruled or not value or not all(type(each) is int for each in value):
            return None
        for part, most, least in (
            ("depth|layers", 1, 1),
            ("head", 2, 2),
            ("hidden|dim|size", 64, 32),
        ):
            if re.search(part, name):
                return [least if each > most else each for each in value]
        return None
    if type(value) is not int or not are_sizes_ruled:
        return None
    if name == "patch_size":
        return min(value, 8)
    for pattern, most, small in _RULES:
        if re.search(pattern, name):
            if value <= most:
                return None
            return 90 + sum(map(ord, name)) % 9 if small is None else small
    return None


def _with_sections(parameters):
    """Return parameters of rotary embeddings whose sections fit heads of 16."""
    return {
        name: [2, 3, 3]
        if name == "mrope_section"
        else _with_sections(value)
        if isinstance(value, dict)
        else value
        for name, value in parameters.items()
    }


def batches(model, padding):
    """Yield batches of two for a model, one of which may be valid.

    Args:
        model: The model.
        padding: Tokens of padding on the left and on the right of the first sequence.
    """
    config, batch = model.config, _first_batch(model, padding)
    names = [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.default is each.empty
        and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    if missing := [name for name in names if name not in batch]:
        raise ValueError(f"requires {', '.join(missing)}")
    yield batch
    generator = torch.Generator().manual_seed(2)
    for name in ("input_features", "input_values"):
        if name in batch:
            values = batch[name]
            bins = _find(config, "num_mel_bins", "feature_size", "n_mels", *_BINS) or 80
            if values.ndim == 3:
                yield batch | {name: values.mT.contiguous()}
            length = _find(config, "max_length") or 64
            if type(length) is int and length <= 2048:
                yield batch | {name: torch.randn(2, length, bins, generator=generator)}
            yield batch | {name: torch.randn(2, 1, 2048, generator=generator)}
    if "bbox" in batch:
        yield batch | {"bbox": batch["bbox"].float()}
    if "image_attention_mask" in inspect.signature(model.forward).parameters:
        image = _image(config, generator)[:, None]
        yield batch | {"pixel_values": image, "image_attention_mask": torch.ones(2, LENGTH, 1)}
    if "pixel_values" in batch:
        frames = _find(config, "num_frames") or 2
        yield batch | {"pixel_values": batch["pixel_values"][:, None].repeat(1, frames, 1, 1, 1)}
        for size in (64, 224):
            yield batch | {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    for name in ("attention_mask", "decoder_input_ids"):
        if name in batch and "input_ids" in batch:
            yield {key: value for key, value in batch.items() if key != name}


_BINS = ("feature_projection_input_dim", "input_dim")


def _first_batch(model, padding):
    config = model.config
    generator = torch.Generator().manual_seed(1)
    accepted = inspect.signature(model.forward).parameters
    batch = {}
    ids = torch.randint(3, 89, (2, LENGTH), generator=generator)
    is_required = "pixel_values" in accepted and accepted["pixel_values"].default is inspect._empty
    if "input_ids" in accepted:
        batch["input_ids"] = ids
        if "attention_mask" in accepted:
            mask = torch.ones_like(ids)
            mask[0, : padding[0]] = mask[0, LENGTH - padding[1] :] = 0
            batch["attention_mask"] = mask
        if "bbox" in accepted:
            batch["bbox"] = torch.zeros(2, LENGTH, 4, dtype=torch.long)
        if "use_cache" in accepted and not getattr(config, "is_encoder_decoder", False):
            batch["use_cache"] = False
    if "pixel_values" in accepted and (is_required or not batch):
        batch["pixel_values"] = _image(config, generator)
    if "input_ids" not in batch:
        bins = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel") or 80
        frames = (_find(config, "max_source_positions") or 32) * 2
        if "input_features" in accepted:
            batch["input_features"] = torch.randn(2, bins, frames, generator=generator)
        if "input_values" in accepted:
            batch["input_values"] = torch.randn(2, 2000, generator=generator)
    if "pixel_values_videos" in accepted and "pixel_values" not in accepted:
        frames = _image(config, generator)[:, None]
        batch["pixel_values_videos"] = frames.repeat(1, _find(config, "num_frames") or 2, 1, 1, 1)
    if "flattened_patches" in accepted:
        width = _find(config, "patch_embed_hidden_size")
        places = torch.randint(1, 4, (2, 9, 2), generator=generator)
        patches = torch.randn(2, 9, width, generator=generator)
        batch["flattened_patches"] = torch.cat([places, patches], 2)
        batch["attention_mask"] = torch.ones(2, 9)
    if "past_values" in accepted:
        shapes = {"past_values": (2, 10), "past_time_features": (2, 10, 1)}
        shapes |= {"past_observed_mask": (2, 10), "future_values": (2, 4)}
        shapes |= {"future_time_features": (2, 4, 1)}
        for name, shape in shapes.items():
            if name in accepted:
                batch[name] = torch.rand(shape, generator=generator)
        if "past_observed_mask" in batch:
            batch["past_observed_mask"] = torch.ones(2, 10)
    if "decoder_input_ids" in accepted:
        batch["decoder_input_ids"] = ids[:, :9]
    return batch


def _image(config, generator):
    size = _find(config, "image_size", "img_size") or 64
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = _find(config, "num_channels", "in_channels", "in_chans") or 3
    return torch.randn(2, channels, height, width, generator=generator)


def _find(config, *names):
    """Return the first option that a configuration or a part of it has."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    for part in getattr(config, "sub_configs", {}):
        given = getattr(config, part, None)
        if isinstance(given, PreTrainedConfig) and (found := _find(given, *names)) is not None:
            return found
    return None
