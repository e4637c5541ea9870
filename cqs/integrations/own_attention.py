"""Attention layers of transformers that do not use its ``AttentionInterface``.

Layers of BLOOM, MPT and Falcon compute attention by the registered function if the configuration
of their model names it. Masks, biases and projections are those of their own code. Other layers
run their own code. Some models find the class of their layers by the name, and need an entry.
"""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import dropout

from cqs.integrations.pattern_mask import PatternMask

_WITH_CLASSES = (
    "bark.modeling_bark", "data2vec.modeling_data2vec_vision",
    "deepseek_ocr2.modeling_deepseek_ocr2", "falcon.modeling_falcon", "git.modeling_git",
    "gpt_neo.modeling_gpt_neo", "gptj.modeling_gptj", "sam.modeling_sam",
    "sam_hq.modeling_sam_hq", "superglue.modeling_superglue",
    "unlimited_ocr.modeling_unlimited_ocr",
)  # fmt: skip
"""Modules with a dictionary from ``attn_implementation`` to the class of a layer."""

_attend_of: dict[str, Callable[..., Any]] = {}
"""Name of an ``attn_implementation`` -> function of one layer, by which all layers are computed."""


def register(name: str, attend: Callable[..., Any]) -> None:
    """Let the layers compute attention by a function.

    Args:
        name: Name of the ``attn_implementation``.
        attend: Function with the signature of transformers' ``AttentionInterface``.
    """
    from transformers.models.bloom import modeling_bloom as bloom
    from transformers.models.falcon import modeling_falcon as falcon
    from transformers.models.mpt import modeling_mpt as mpt

    if not _attend_of:
        for layer, forward in (
            (bloom.BloomAttention, _attend_bloom),
            (mpt.MptAttention, _attend_mpt),
            (falcon.FalconAttention, _attend_falcon),
        ):
            layer.forward = _asking(layer.forward, forward)
        mpt.create_causal_mask = _with_visible_mask(mpt.create_causal_mask)
        for model in (bloom.BloomModel, mpt.MptModel):
            model.forward = _with_configuration(model.forward)
        bases = bloom.BloomPreTrainedModel, mpt.MptPreTrainedModel, falcon.FalconPreTrainedModel
        for base in bases:  # transformers looks for its interface in their code
            base._can_set_attn_implementation_cached_value = True
    _attend_of[name] = attend
    for path in _WITH_CLASSES:
        with suppress(ImportError):  # another version of transformers
            for label, classes in vars(import_module(f"transformers.models.{path}")).items():
                if label.endswith("_ATTENTION_CLASSES"):
                    classes[name] = classes["eager"]


def with_eager_masks(
    make: Callable[..., Tensor], make_eager: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a mask function that gives models with attention of their own the masks of "eager".

    Their code may convert a mask to numbers, so that a boolean one would mask nothing out.
    """

    def mask(**options: Any) -> Tensor:
        is_own = "config" in options and _is_package_own(type(options["config"]).__module__)
        return make_eager(**options) if is_own else make(**options)

    return mask


@cache
def _is_own(module: str) -> bool:
    """Return whether no layer in the package of a configuration uses the interface.

    As transformers itself decides it, by the text of the package's modules.
    """
    family = module.split(".")[-2] if "." in module else ""
    path = getattr(sys.modules[module], "__file__", None)
    if path is None or family in ("bloom", "falcon", "mpt"):
        return False
    # Half of Informer's layers require that there is no mask, DeepSeek V4 appends numbers to it.
    if family in ("deepseek_v4", "informer"):
        return True
    code = "".join(file.read_text("utf-8") for file in Path(path).parent.glob("modeling_*.py"))
    has_layer = re.search(r"^class \w*Attention\w*\(nn\.Module\):", code, re.MULTILINE)
    return has_layer is not None and "ALL_ATTENTION_FUNCTIONS" not in code


def _is_package_own(module: str) -> bool:
    return _is_own(module)


# As torch.compiler.assume_constant_result does, which imports the compiler.
_is_package_own._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _asking(own: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``forward`` of a layer that asks for its attention."""

    @wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(self, "config", None)
        attend = None if config is None else _attend_of.get(config._attn_implementation)
        if attend is None:
            return own(self, *args, **kwargs)
        return forward(self, attend, *args, **kwargs)

    return call


def _with_configuration(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``forward`` of a model whose layers do not know its configuration."""

    @wraps(own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self.h if hasattr(self, "h") else self.blocks:
            layer = block.self_attention if hasattr(block, "self_attention") else block.attn
            layer.config = self.config
        return own(self, *args, **kwargs)

    return call


def _with_visible_mask(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return the mask function of MPT, whose own layers mask out pairs with a mask other than 0.

    A mask of four dimensions, additive or boolean, becomes one that is true for visible pairs.
    """

    @wraps(own)
    def call(**options: Any) -> Any:
        mask = options["attention_mask"]
        if (
            options["config"]._attn_implementation in _attend_of
            and getattr(mask, "ndim", 2) == 4
            and not isinstance(mask, PatternMask)
        ):
            options["attention_mask"] = ~mask.bool()
        return own(**options)

    return call


def _attend_bloom(
    self: Any,
    attend: Callable[..., Any],
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replace the forward method of Bloom's attention."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attend(
        self,
        *(query, key, value, attention_mask),
        dropout=self.attention_dropout.p if self.training else 0.0,
        scaling=self.inv_norm_factor,
        position_bias=alibi.unflatten(0, (-1, self.num_heads)),
        output_attentions=output_attentions,
    )
    output = dropout(self.dense(output.flatten(2)), self.hidden_dropout, self.training)
    return residual + output, None


def _attend_mpt(
    self: Any,
    attend: Callable[..., Any],
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replace the forward method of MPT's attention."""
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    query, key, value = mixed.unflatten(2, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, self.layer_idx)
    output, _ = attend(
        self,
        *(query, key, value, attention_mask),
        dropout=self.attn_dropout_p if self.training else 0.0,
        scaling=self.softmax_scale,
        position_bias=position_bias[None, ..., -key.shape[2] :],
    )
    return self.out_proj(output.flatten(2)), None


def _attend_falcon(
    self: Any,
    attend: Callable[..., Any],
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    output_attentions: bool = False,
    position_embeddings: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute a layer of Falcon, whose mask includes ALiBi."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    parts = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, self.layer_idx)
    output, _ = attend(
        self,
        *(query, key, value, attention_mask),
        dropout=self.attention_dropout.p if self.training and alibi is not None else 0.0,
        output_attentions=output_attentions,
    )
    return self.dense(output.flatten(2)), None
