"""Families of transformers compute and generate the same with attention by cqs.

Prefill and five tokens of greedy generation, with padding on either side, in float32.
"""

from unittest import mock

import pytest
import torch
import transformers
from judged.tiny_configs import make_config

import cqs
from cqs.integrations.transformers import register

pytestmark = pytest.mark.slow

DECODERS = {
    "ApertusForCausalLM": "",
    "BioGptForCausalLM": "",
    "BloomForCausalLM": "bias",
    "Cohere2ForCausalLM": "",
    "DeepseekV32ForCausalLM": "",
    "DeepseekV3ForCausalLM": "",
    "DogeForCausalLM": "bias",
    "Ernie4_5ForCausalLM": "",
    "Exaone4ForCausalLM": "",
    "FalconForCausalLM": "bias",
    "FlintForCausalLM": "sinks",
    "GPT2LMHeadModel": "",
    "GPTNeoXForCausalLM": "",
    "Gemma2ForCausalLM": "softcap",
    "Gemma3ForCausalLM": "",
    "GemmaForCausalLM": "",
    "Glm4ForCausalLM": "",
    "GptOssForCausalLM": "sinks",
    "GraniteForCausalLM": "",
    "GraniteSWAForCausalLM": "sinks",
    "HeliumForCausalLM": "",
    "Llama4ForCausalLM": "",
    "LlamaForCausalLM": "",
    "MistralForCausalLM": "",
    "MixtralForCausalLM": "",
    "MptForCausalLM": "bias",
    "NemotronForCausalLM": "",
    "OPTForCausalLM": "",
    "Olmo2ForCausalLM": "",
    "Phi3ForCausalLM": "",
    "Qwen2ForCausalLM": "",
    "Qwen3ForCausalLM": "",
    "Qwen3MoeForCausalLM": "",
    "SmolLM3ForCausalLM": "",
    "StableLmForCausalLM": "",
    "Starcoder2ForCausalLM": "",
    "VaultGemmaForCausalLM": "softcap",
}
"""Model -> option of the scores that its layers use."""
ENCODER_DECODERS = {
    "BartForConditionalGeneration": "",
    "M2M100ForConditionalGeneration": "",
    "MT5ForConditionalGeneration": "bias",
    "SwitchTransformersForConditionalGeneration": "bias",
    "T5ForConditionalGeneration": "bias",
    "T5GemmaForConditionalGeneration": "softcap",
    "UMT5ForConditionalGeneration": "bias",
}
ENCODERS = {"BertModel": "", "ModernBertModel": "", "SwinModel": "bias", "ViTModel": ""}
OTHERS = {"FalconForCausalLM": {"alibi": True}}
"""Model -> options of its configuration beyond the tiny ones."""
REFERENCE = {"FalconForCausalLM": "sdpa"}
"""Model -> attention that is compared; Falcon's eager attention adds ALiBi twice."""
PADDINGS = {"left": (5, 0), "right": (0, 6)}
calls = []


def counted(*args, **kwargs):
    calls.append(kwargs["scores"])
    return cqs.attention(*args, **kwargs)


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Register an attention that counts its calls; the models are too small for threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch("cqs.integrations.transformers.attention", counted):
        register("cqs-counted", num_tasks=3)
    yield
    torch.set_num_threads(threads)


def make(name):
    kind = getattr(transformers, name)
    config = make_config(kind.config_class)
    for option, value in OTHERS.get(name, {}).items():
        setattr(config, option, value)
    config._attn_implementation = REFERENCE.get(name, "eager")
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


def compared(name, feature, compute):
    """Compare what two implementations compute, and check that cqs has computed the second."""
    model = make(name)
    expected = compute(model)
    calls.clear()
    model.set_attn_implementation("cqs-counted")
    found = compute(model)
    assert calls, "the model keeps its own attention"
    assert not feature or any(getattr(each, feature) is not None for each in calls)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def generated(model, batch):
    """Return the logits of the prompt's tokens, the tokens, and their logits."""
    mask = batch["attention_mask"].bool()
    is_decoder = not model.config.is_encoder_decoder
    logits = model(**batch, **({} if is_decoder else {"decoder_input_ids": batch["input_ids"]}))[0]
    options = {"do_sample": False, "min_new_tokens": 5, "max_new_tokens": 5, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    if not is_decoder:
        options["decoder_start_token_id"] = 1
    found = model.generate(**batch, **options)
    assert len(found.logits) == 5
    return [logits[mask] if is_decoder else logits, found.sequences, *found.logits]


@pytest.mark.parametrize("side", PADDINGS)
@pytest.mark.parametrize("name", [*DECODERS, *ENCODER_DECODERS])
def test_prefill_and_generation_match(name, side):
    feature = (DECODERS | ENCODER_DECODERS)[name]
    compared(name, feature, lambda model: generated(model, batch_of(PADDINGS[side])))


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_match(name):
    def encoded(model):
        with torch.no_grad():
            if model.main_input_name == "pixel_values":
                pixels = torch.randn(2, 3, 32, 32, generator=torch.manual_seed(1))
                return [model(pixel_values=pixels)[0]]
            batches = map(batch_of, PADDINGS.values())
            return [model(**each)[0][each["attention_mask"].bool()] for each in batches]

    compared(name, ENCODERS[name], encoded)


def test_whisper_transcribes():
    def transcribed(model):
        sound = torch.randn(2, 80, 128, generator=torch.manual_seed(1))
        options = {"do_sample": False, "min_new_tokens": 5, "max_new_tokens": 5}
        with torch.no_grad():
            tokens = torch.ones(2, 4, dtype=torch.long)
            logits = model(input_features=sound, decoder_input_ids=tokens)[0]
            found = super(type(model), model).generate(
                sound, decoder_input_ids=tokens, return_dict_in_generate=True, **options
            )
        return [logits, found.sequences]

    compared("WhisperForConditionalGeneration", "", transcribed)
