"""Models of transformers compute the same with attention by cqs as with their own."""

import sys
from types import ModuleType

import pytest
import shards
import tiny_models
import torch
import transformers
from judged import transformers_families
from judged.tiny_configs import make_config
from support.exact import assert_tracks_exact
from tiny_models import BATCHES, TOKENS, assert_alike, make_model, passes, with_attention
from transformers import AttentionInterface, masking_utils

import cqs
from cqs.integrations.masks import Stacked, by_batch
from cqs.integrations.transformers import register

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

register()
register("cqs-of-5", num_tasks=5)


def check(model, batch, reference="sdpa", attention="cqs", tolerance=1e-10):
    """Compare outputs and gradients of a model with those of another attention."""
    expected = passes(with_attention(model, reference), **batch)
    assert_alike(passes(with_attention(model, attention), **batch), expected, tolerance)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *[("GptOss", "whole"), ("Llama", "packed"), ("Mistral", "padded on the left")],
        *[("Qwen2", "packed"), ("Bert", "padded on the right"), ("Gemma2", "packed")],
    ],
)
def test_outputs_and_gradients_match(family, kind):
    reference = tiny_models.reference_of(family)
    tolerance = 1e-5 if family == "Gemma2" else 1e-10  # its softmax is in float32
    check(make_model(family), BATCHES[kind](), reference, "cqs-of-5", tolerance)


@pytest.mark.parametrize(
    ("family", "window", "options"),
    [
        ("Mistral", 7, {}),
        ("Mistral", 1, {}),  # the cache returns all keys, and the mask is of one
        ("Mistral", 7, {"use_cache": False}),
        ("Qwen2", 9, {"num_beams": 2}),
        ("GptOss", 7, {"cache_implementation": "static"}),
    ],
    ids=str,
)
def test_generation_with_padding_on_the_left_matches(family, window, options):
    model = make_model(family, sliding_window=window).float()
    batch = BATCHES["padded on the left"]()
    options = options | {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected, ours = (
        with_attention(model, name).generate(**batch, **options)
        for name in (tiny_models.reference_of(family), "cqs")
    )
    assert torch.equal(ours.sequences, expected.sequences)
    assert ours.sequences.shape[1] == TOKENS + 4
    torch.testing.assert_close(ours.logits, expected.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["T5Gemma2Model", "Qwen2MoeForCausalLM", "BigBirdPegasusModel", "MoonshineModel"]
)
def test_models_whose_code_reads_the_mask_compute_the_same(name):
    """They concatenate masks, make some that no layer uses, add them to scores, look for None."""
    kind = getattr(transformers, name)
    model, batch, expected = transformers_families.make_model(kind, padding=(5, 0))
    found, spy = transformers_families.results_of_cqs(model, batch)
    assert spy.called and transformers_families.deviation(found, expected) <= 1


def test_an_encoder_generates_with_a_static_cache():
    """Its model takes the mask that ``generate`` has made as one of the user's own."""
    model = transformers.BertLMHeadModel(tiny_models.config_of("Bert")).eval()
    batch = BATCHES["padded on the left"]()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options["cache_implementation"] = "static"
    expected, found = (
        with_attention(model, name).generate(**batch, **options) for name in ("eager", "cqs")
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["RoFormer", "Canine", "GPTJ"])
def test_a_model_that_has_its_own_attention_keeps_it(family):
    """With masks of eager attention, which Canine converts to numbers; transformers warns."""
    config = make_config(getattr(transformers, f"{family}Config"))
    model = getattr(transformers, f"{family}Model")(config)
    model.set_attn_implementation("cqs")
    assert model.config._attn_implementation != "cqs"
    config._attn_implementation = "cqs"
    own = type(model)(config)
    own.load_state_dict(model.state_dict())
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]] * 2)
    batch = {"input_ids": tokens, "attention_mask": (tokens < 7) | torch.tensor([[1], [0]]).bool()}
    assert torch.equal(own.eval()(**batch)[0], model.eval()(**batch)[0])


def make_model_with_alibi(family):
    """Return a model in float32, as its own softmax."""
    config = make_config(getattr(transformers, f"{family}Config"))
    config.alibi = True  # an option of Falcon
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@pytest.mark.parametrize("family", ["Bloom", "Mpt", "Falcon"])
def test_layers_with_alibi_match(family):
    """Falcon's eager attention adds ALiBi twice, sdpa once."""
    model = make_model_with_alibi(family)
    reference = "sdpa" if family == "Falcon" else "eager"
    with transformers_families.counted("cqs-of-5") as spy:
        check(model, BATCHES["padded on the left"](), reference, "cqs-of-5", 1e-5)
    assert spy.call_count == 2


def test_masks_of_the_users_own_are_those_of_mpt():
    """Its own layers mask out what is not 0, in an additive mask and in a boolean one."""
    model, batch = make_model_with_alibi("Mpt"), BATCHES["whole"]()
    hidden = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
    hidden[..., 5:, 2] = True
    for mask in (hidden, hidden * torch.finfo(torch.float32).min):
        check(model, batch | {"attention_mask": mask}, "eager", tolerance=1e-5)


def test_masks_of_the_users_own_are_honoured():
    model, batch = make_model("Llama"), BATCHES["whole"]()
    seen = torch.rand(3, 4, TOKENS, TOKENS) < 0.5
    seen |= torch.eye(TOKENS, dtype=torch.bool)
    for mask in (seen[:1, :1], seen):
        check(model, batch | {"attention_mask": mask.expand(3, -1, -1, -1)})


def later(batch, head, query, key):
    return key <= query + 2


def not_third(batch, head, query, key):
    return key % 3 < 2


MASKS = {
    "causal": ("create_causal_mask", 6, {}),
    "bidirectional": ("create_bidirectional_mask", 6, {}),
    "chunks": ("create_chunked_causal_mask", 6, {}),
    "more": ("create_causal_mask", 6, {"or_mask_function": later}),
    "less": ("create_bidirectional_mask", 6, {"and_mask_function": not_third}),
} | {
    f"{kind} window of {window}": (f"create_{kind}_mask", window, {})
    for kind in ("sliding_window_causal", "bidirectional_sliding_window")
    for window in (6, 1, 0, -1)
}
"""Name -> function of transformers, size of its window and further options."""
PADDINGS = {
    "none": None,
    "all tokens": torch.ones(TOKENS, dtype=torch.bool),
    "left": torch.arange(TOKENS) >= 4,
    "right": torch.arange(TOKENS) < TOKENS - 3,
    "both": (torch.arange(TOKENS) >= 4) & (torch.arange(TOKENS) < TOKENS - 5),
    "holes": torch.rand(TOKENS, generator=torch.Generator().manual_seed(0)) < 0.7,
}
"""Name -> tokens of the first of two sequences that are no padding."""


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", MASKS)
def test_patterns_are_the_masks(name, padding):
    """Of what transformers' functions for masks hand over, compared with what sdpa gets."""
    maker, window, options = MASKS[name]
    config = tiny_models.config_of("Llama")
    config.sliding_window, config.attention_chunk_size = window, 5
    tokens = PADDINGS[padding]
    mask = None if tokens is None else torch.stack([tokens, torch.ones_like(tokens)])
    skip = "bidirectional" if "bidirectional" in maker else "causal"
    found = []
    for implementation in ("cqs", "sdpa"):
        config._attn_implementation = implementation
        embeddings = torch.empty(2, TOKENS, 0)
        arguments = {"config": config, "inputs_embeds": embeddings, "attention_mask": mask}
        arguments |= {"past_key_values": None, f"allow_is_{skip}_skip": False} | options
        found.append(getattr(masking_utils, maker)(**arguments))
    ours, expected = found
    pattern = ours.source.pattern
    if isinstance(pattern, Stacked):
        pattern = by_batch(pattern.rows)
    assert (torch.from_numpy(pattern.to_mask(TOKENS)) == expected).all()
    copy = ours.clone()
    assert torch.equal(ours, expected)
    ours.zero_()
    assert torch.equal(copy, expected) and not ours.any()


def test_a_decoder_may_be_asked_to_look_both_ways():
    model = make_model("Llama")
    batch = BATCHES["whole"]()
    check(model, batch | {"is_causal": False})
    both_ways = passes(model, **batch, is_causal=False)["output"]
    assert (both_ways - passes(model, **batch)["output"]).abs().max() > 1e-3


def test_lengths_of_packed_sequences_are_honoured():
    """Also where a cache keeps transformers from looking at the positions."""
    model = make_model("Mistral")
    batch = {
        name: tensor[:1] for name, tensor in BATCHES["packed"]().items() if name != "use_cache"
    }
    expected = passes(with_attention(model, "sdpa"), **batch, use_cache=False)
    lengths = torch.tensor([0, 10, 11, 33])
    assert_alike(passes(with_attention(model, "cqs"), **batch, cu_seq_lens_q=lengths), expected)


def test_known_rules_cost_a_few_integers():
    """Of a sequence whose mask would not fit into memory."""
    config = tiny_models.config_of("Mistral")
    config._attn_implementation = "cqs"
    tokens = 10**6
    options = {"inputs_embeds": torch.empty(1, tokens, 0), "past_key_values": None}
    options |= {"config": config, "attention_mask": None}
    mask = masking_utils.create_causal_mask(**options)
    assert mask.shape == (1, 1, tokens, tokens)
    assert mask.source.pattern == cqs.patterns.causal()
    window = masking_utils.create_sliding_window_causal_mask(**options).source.pattern
    assert window.bind(tokens).num_pairs == 7 * tokens - 21
    positions = torch.arange(tokens)[None] % 1000
    packed = masking_utils.create_causal_mask(**options, position_ids=positions).source.pattern
    assert packed.bind(tokens).num_pairs == 1000 * 1000 * 1001 // 2


def test_dropout_is_that_of_cqs():
    attend = AttentionInterface()["cqs"]
    query, key, value = (torch.randn(2, 4, 20, 8) for _ in range(3))
    torch.manual_seed(5)
    found, _ = attend(torch.nn.Module(), query, key, value, None, dropout=0.4)
    torch.manual_seed(5)
    expected = cqs.attention(query, key, value, is_causal=True, dropout_p=0.4)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["whole", "padded on the right"])
def test_a_model_on_a_gpu_tracks_one_in_float64(kind):
    model = make_model("Llama", hidden_size=128).bfloat16().cuda()
    batch = {name: tensor.cuda() for name, tensor in BATCHES[kind]().items()}
    found, eager = (passes(with_attention(model, name), **batch) for name in ("cqs", "eager"))
    exact = passes(model.double(), **batch)
    assert found.keys() == exact.keys()
    for name, want in exact.items():
        assert found[name].dtype == torch.bfloat16 and found[name].is_cuda
        assert_tracks_exact(found[name], eager[name], want, slack=3, name=name)


class Layer(torch.nn.Module):
    layer_idx = 7
    is_causal = True


def refuse(message, mask=None, name="cqs", seqlen_q=6, error=NotImplementedError, **asked):
    query = torch.randn(1, 2, seqlen_q, 8)
    key = torch.randn(1, 2, 6, 8)
    with pytest.raises(error, match=f"^Layer of layer 7: {message}"):
        AttentionInterface()[name](Layer(), query, key, key, mask, **asked)


def test_what_cannot_be_honoured_is_refused_with_the_name_of_the_layer():
    for name in ("sinks", "head_mask", "cache", "block_indices"):
        refuse(f"{name} is not supported", **{name: 1.0})
    refuse("output_attentions is not supported", output_attentions=True)
    refuse("sliding_window must be None .* got 3", sliding_window=3)
    refuse("causal attention of 2 queries to 6 keys", seqlen_q=2)
    refuse(
        r"attention_mask must be \[batch, heads, seqlen_q, seqlen_kv\], got \[1, 6\]",
        torch.ones(1, 6),
    )
    refuse("scores.bias must be", position_bias=torch.zeros(1, 2, 6, 5), error=ValueError)
    refuse(r"scores.sinks must be \[num_heads\]", s_aux=torch.zeros(3), error=ValueError)
    register("cqs-by-cpu", backend="cpu")
    refuse("backend 'cpu' does not support dropout", name="cqs-by-cpu", dropout=0.1)


def test_a_float_mask_may_bias_scores():
    """Of a user or a model, with gradients; masked pairs and other values in one tensor."""
    query, key = (torch.randn(2, 2, 6, 8, dtype=torch.float64) for _ in range(2))
    added = torch.randn(2, 2, 6, 6, dtype=torch.float64)
    added[0, :, :, :2] = torch.finfo(torch.float64).min
    added[1, :, :, 4:] = -torch.inf
    masks = [added.clone().requires_grad_() for _ in range(2)]
    attend = AttentionInterface()["cqs-of-5"]
    weights = (query @ key.mT / 8**0.5 + masks[0]).softmax(-1)
    expected = (weights @ key).transpose(1, 2)
    output, _ = attend(Layer(), query, key, key, masks[1])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    (expected.square().sum() + output.square().sum()).backward()
    torch.testing.assert_close(masks[1].grad, masks[0].grad, rtol=0, atol=1e-12)
    zeros = torch.zeros(1, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    attend(Layer(), query, key, key, zeros)[0].square().sum().backward()
    assert zeros.grad.abs().max() > 1e-3, "a learned bias may begin as zeros"


def test_bias_of_a_layer_and_mask_are_added():
    query = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    bias, added = torch.randn(2, 1, 2, 6, 6, dtype=torch.float64)
    attend, options = AttentionInterface()["cqs-of-5"], {"position_bias": bias}
    found, _ = attend(Layer(), query, query, query, added, **options)
    weights = (query @ query.mT / 8**0.5 + bias + added).softmax(-1)
    torch.testing.assert_close(found, (weights @ query).transpose(1, 2), rtol=0, atol=1e-12)


def test_indices_are_the_keys_that_a_query_sees():
    """As the layers of DeepSeek V3.2 pass them; -1 is no key."""
    query = torch.randn(2, 2, 6, 8, dtype=torch.float64)
    indices = torch.tensor([[0, 1, -1]] * 6 + [[5, 2, 0]] * 6).view(2, 6, 3).int()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    visible = (indices.unsqueeze(-1) == torch.arange(6)).any(-2)
    attend = AttentionInterface()["cqs-of-5"]
    found, _ = attend(Layer(), query, query, query, mask, indices=indices)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, query, query, mask & visible[:, None]
    )
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-12)


def test_attention_weights_come_from_the_eager_attention():
    attend, layer = AttentionInterface()["cqs"], make_model("Llama").model.layers[0].self_attn
    query, mask = torch.randn(1, 4, 6, 8), torch.ones(1, 1, 6, 6).tril().bool()
    with pytest.warns(UserWarning, match="eager attention computes the layers"):
        output, weights = attend(layer, query, query, query, mask, 0.0, 0.3, output_attentions=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 4, 6))
    exact = (0.3 * query @ query.mT).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, exact)
    torch.testing.assert_close(output, (exact @ query).transpose(1, 2))


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="cluster and num_tasks must be None .* got None and 3"):
        register("cqs-wrong", group=object(), num_tasks=3)
    with pytest.raises(ValueError, match="backend must be one of"):
        register("cqs-wrong", backend="fast")
    assert "cqs-wrong" not in AttentionInterface()


def test_transformers_without_the_interface_is_refused(monkeypatch):
    old = ModuleType("transformers")
    for missing in (old, None):
        monkeypatch.setitem(sys.modules, "transformers", missing)
        with pytest.raises(ImportError, match="transformers must be 5.4 or later: pip install"):
            register()


@pytest.mark.ray
def test_a_cluster_computes_the_same(cluster):
    register("cqs-on-actors", cluster=cluster)
    check(make_model("Bert"), BATCHES["padded on the right"](), attention="cqs-on-actors")


@pytest.mark.sample(9)
@pytest.mark.parametrize("family", ["GptOss", "Bert"])
def test_ranks_of_a_group_share_a_sequence(ranks, family):
    """Outputs and gradients of three ranks that have a part each are those of the whole."""
    for kind in ("padded on the left", "padded on the right"):
        assert max(ranks.run(3, shards.error_of_shards, family, BATCHES[kind]())) < 1e-10


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([(7, 3, 10, 13)], None),
        ([(10, 1, 22), (33,), (3, 4, 13, 13)], None),
        ([(10, 1, 22)], (0, 10, 1, 22)),
        ([(7, 13, 13)], (0, 7, 13, 13)),
    ],
    ids=str,
)
def test_ranks_of_a_group_share_packed_sequences(ranks, rows, lengths):
    """Also where shards end within sequences or with them, or the rows of a batch differ."""
    batch = tiny_models.packed_rows(*rows)
    assert max(ranks.run(3, shards.error_of_shards, "Mistral", batch, lengths)) < 1e-10


def test_what_a_group_cannot_do_is_refused(ranks):
    messages = ranks.run(2, shards.complaints)
    for found in messages:
        assert (
            "position_ids must be positions in the whole sequence, got 0 on rank 1"
            in found["positions"]
        )
        assert "output_attentions is not supported" in found["weights"]
        assert "attention_mask must be the padding mask" in found["mask"]
        assert "a cache is not supported with a process group" in found["cache"]
        assert "cu_seq_lens_q must be of the sequences of all ranks" in found["lengths"]
        assert "with a process group" in found["read"]
        assert "layers need whole sequences" in found["state"]
