"""Families of transformers generate the same with attention by cqs.

Five tokens of greedy generation, with padding on either side, in float32.
"""

import pytest
import torch
import transformers
from judged.tiny_configs import make_config
from judged.transformers_families import counted

from cqs.integrations.transformers import register

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

DECODERS = """
    Apertus BioGpt Bloom Cohere2 DeepseekV3 DeepseekV32 DeepseekV4 Doge Ernie4_5 Exaone4 Falcon
    Flint GPTNeoX Gemma Gemma2 Gemma3 Glm4 GptOss Granite GraniteSWA Helium Llama Llama4 Mistral
    Mixtral Mpt Nemotron OPT Olmo2 Phi3 Qwen2 Qwen3 Qwen3Moe SmolLM3 StableLm Starcoder2
    VaultGemma
""".split()
ENCODER_DECODERS = "T5 Bart M2M100 MT5 SwitchTransformers T5Gemma UMT5".split()
MODELS = [f"{name}ForConditionalGeneration" for name in ENCODER_DECODERS]
MODELS += [*(f"{name}ForCausalLM" for name in DECODERS), "GPT2LMHeadModel"]
register("cqs-of-3", num_tasks=3)


def make(name):
    kind = getattr(transformers, name)
    config = make_config(kind.config_class)
    is_falcon = name == "FalconForCausalLM"  # its eager attention adds ALiBi twice
    if is_falcon:
        config.alibi = True
    config._attn_implementation = "sdpa" if is_falcon else "eager"
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:  # scores that differ between keys
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch_of(padding):
    tokens = torch.randint(3, 89, (2, 17), generator=torch.manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, : padding[0]] = mask[0, 17 - padding[1] :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@torch.no_grad()
def generated(model, batch):
    """Return five tokens, and their logits."""
    options = {"do_sample": False, "min_new_tokens": 5, "max_new_tokens": 5, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if model.config.is_encoder_decoder:
        options["decoder_start_token_id"] = 1
    generation = model.generate(**batch, **options)
    assert len(generation.logits) == 5
    return [generation.sequences, *generation.logits]


@pytest.mark.sample(1000)  # the first alone
@pytest.mark.parametrize("padding", [(5, 0), (0, 6)], ids=["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_matches(name, padding):
    model, batch = make(name), batch_of(padding)
    expected = generated(model, batch)
    with counted("cqs-of-3") as spy:
        model.set_attn_implementation("cqs-of-3")
        results = generated(model, batch)
    assert spy.called, "the model keeps its own attention"
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)
