"""What ranks run to compare models on parts of a sequence with the whole."""

from itertools import pairwise

import torch
import torch.distributed as dist
from program import complaint_of
from tiny_models import (
    BATCHES,
    TOKENS,
    VOCABULARY,
    make_model,
    passes,
    reference_of,
    with_attention,
)
from transformers.masking_utils import create_causal_mask

from cqs.integrations.transformers import register

CUTS = (0, 7, 20, TOKENS)


def _part(batch, rank):
    start, stop = list(pairwise(CUTS))[rank]
    return {
        name: each[:, start:stop] if torch.is_tensor(each) else each for name, each in batch.items()
    }


def error_of_shards(group, family, batch, lengths=None):
    """Return the largest error of a rank's outputs, and of the sum of all ranks' gradients.

    The lengths of packed sequences are passed to the ranks, besides positions, if they are given.
    """
    register("cqs-of-group", group=group)
    rank, batch = dist.get_rank(group), dict(batch)
    shape = batch["input_ids"].shape
    batch.setdefault("position_ids", torch.arange(TOKENS).expand(shape[0], -1))
    width = 32 if family == "Bert" else VOCABULARY
    weights = torch.randn(*shape, width, generator=torch.manual_seed(2), dtype=torch.float64)
    weights *= batch.get("attention_mask", torch.ones(shape)).unsqueeze(-1)  # not of padding
    model = with_attention(make_model(family), reference_of(family))
    expected = passes(model, weights, **batch)
    model = with_attention(make_model(family), "cqs-of-group")
    options = {} if lengths is None else {"cu_seq_lens_q": torch.tensor(lengths).cumsum(0)}
    part, weights = _part(batch, rank), _part({"weights": weights}, rank)["weights"]
    found = passes(model, weights, **part, **options)
    output = _part({"output": expected.pop("output")}, rank)["output"]
    live = weights.any(-1)
    errors = [(found.pop("output") - output)[live].abs().max() if live.any() else torch.zeros(())]
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        dist.all_reduce(gradient, group=group)
        errors.append((gradient - expected[name]).abs().max())
    return float(max(errors))


def complaints(group):
    """Return what is raised where positions are missing, and for lengths, caches and masks."""
    register("cqs-of-group", group=group)
    rank, batch = dist.get_rank(group), BATCHES["whole"]()
    model = with_attention(make_model("Llama"), "cqs-of-group")
    part = _part(batch, rank)
    found = {"positions": complaint_of(lambda: model(**part))}
    ends = torch.tensor([0, part["input_ids"].shape[1]])
    found["lengths"] = complaint_of(lambda: model(**part, cu_seq_lens_q=ends))
    part |= _part({"position_ids": torch.arange(TOKENS).expand(3, -1)}, rank)
    cache = model(**part).past_key_values
    found["cache"] = complaint_of(lambda: model(part["input_ids"], past_key_values=cache))
    asked = {"output_attentions": True} if rank == 1 else {}
    found["weights"] = complaint_of(lambda: model(**part, **asked))
    mask = torch.ones(3, 1, 1, 1).expand(-1, -1, part["input_ids"].shape[1], TOKENS).bool()
    own_mask = {"attention_mask": mask} if rank == 1 else {}
    found["mask"] = complaint_of(lambda: model(**part | own_mask))
    model.config.mamba_d_state = 16  # as in models with state-space layers
    found["state"] = complaint_of(lambda: model(**part))
    del model.config.mamba_d_state
    mask = create_causal_mask(model.config, torch.empty(*part["input_ids"].shape, 0), None, None)
    found["read"] = complaint_of(mask.any)
    assert complaint_of(lambda: model(**part)) is None, "what was refused has left nothing behind"
    return found
