"""What ranks run to compare models on parts of a sequence with the whole."""

from itertools import pairwise

import torch
import torch.distributed as dist
from tiny_models import (
    BATCHES,
    TOKENS,
    VOCABULARY,
    make_model,
    reference_of,
    token_ids,
    with_attention,
)
from transformers.masking_utils import create_causal_mask

from cqs.integrations.transformers import register

CUTS = (0, 7, 20, TOKENS)


def _part(batch, rank):
    start, stop = list(pairwise(CUTS))[rank]
    return {name: tensor[:, start:stop] for name, tensor in batch.items()}


def _passes(model, batch, weights):
    """Return outputs and the gradients of their weighted sum."""
    output = model(**batch)[0]
    (output * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return output.detach(), {name: grad for name, grad in found.items() if grad is not None}


def _packed_rows(*rows):
    """Return a batch whose rows are packed sequences of these lengths."""
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in rows]
    return {"input_ids": token_ids(len(rows)), "position_ids": torch.stack(positions)}


PACKED = {
    "packed": lambda: _packed_rows((10, 1, 22)),
    "packed at the ends of shards": lambda: _packed_rows((7, 3, 10, 13)),
    "packed as shards": lambda: _packed_rows((7, 13, 13)),
    "packed in one row": lambda: _packed_rows((10, 1, 22), (33,), (3, 4, 13, 13)),
}


def error_of_shards(group, family, kind, lengths=None):
    """Return the largest error of a rank's outputs, and of the sum of all ranks' gradients.

    The lengths of packed sequences are passed to the ranks, besides positions, if they are given.
    """
    register("cqs-of-group", group=group)
    rank, batch = dist.get_rank(group), (BATCHES | PACKED)[kind]()
    shape = batch["input_ids"].shape
    batch.setdefault("position_ids", torch.arange(TOKENS).expand(shape[0], -1))
    width = 32 if family == "Bert" else VOCABULARY
    weights = torch.randn(*shape, width, generator=torch.manual_seed(2), dtype=torch.float64)
    weights *= batch.get("attention_mask", torch.ones(shape)).unsqueeze(-1)  # not of padding
    options = {"use_cache": False} if kind in PACKED else {}
    model = with_attention(make_model(family), reference_of(family))
    output, gradients = _passes(model, batch | options, weights)
    of_whole = {"output": output, "weights": weights}
    wanted = _part(of_whole, rank)
    model = with_attention(make_model(family), "cqs-of-group")
    if lengths is not None:
        options["cu_seq_lens_q"] = torch.tensor(lengths).cumsum(0)
    found, parts = _passes(model, _part(batch, rank) | options, wanted["weights"])
    live = wanted["weights"].any(-1)
    errors = [(found - wanted["output"])[live].abs().max() if live.any() else torch.zeros(())]
    assert parts.keys() == gradients.keys()
    for name, part in parts.items():
        dist.all_reduce(part, group=group)
        errors.append((part - gradients[name]).abs().max())
    return float(max(errors))


def _complaint(call):
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return None


def complaints(group):
    """Return what is raised where positions are missing, and for lengths, caches and masks."""
    register("cqs-of-group", group=group)
    rank, batch = dist.get_rank(group), BATCHES["whole"]()
    model = with_attention(make_model("Llama"), "cqs-of-group")
    part = _part(batch, rank)
    found = {"positions": _complaint(lambda: model(**part))}
    ends = torch.tensor([0, part["input_ids"].shape[1]])
    found["lengths"] = _complaint(lambda: model(**part, cu_seq_lens_q=ends))
    part |= _part({"position_ids": torch.arange(TOKENS).expand(3, -1)}, rank)
    cache = model(**part).past_key_values
    found["cache"] = _complaint(lambda: model(part["input_ids"], past_key_values=cache))
    asked = {"output_attentions": True} if rank == 1 else {}
    found["weights"] = _complaint(lambda: model(**part, **asked))
    mask = torch.ones(3, 1, 1, 1).expand(-1, -1, part["input_ids"].shape[1], TOKENS).bool()
    own_mask = {"attention_mask": mask} if rank == 1 else {}
    found["mask"] = _complaint(lambda: model(**part | own_mask))
    mask = create_causal_mask(model.config, torch.empty(*part["input_ids"].shape, 0), None, None)
    found["read"] = _complaint(mask.any)
    assert _complaint(lambda: model(**part)) is None, "what was refused has left nothing behind"
    return found
