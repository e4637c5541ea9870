"""What ranks run to compare models on parts of a sequence with the whole."""

from itertools import pairwise

import torch
import torch.distributed as dist
from tiny_models import BATCHES, TOKENS, VOCABULARY, make_model, with_attention
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


def error_of_shards(group, family, kind):
    """Return the largest error of a rank's outputs, and of the sum of all ranks' gradients."""
    register("cqs-of-group", group=group)
    rank, batch = dist.get_rank(group), BATCHES[kind]()
    batch["position_ids"] = torch.arange(TOKENS).expand(3, -1)
    width = 32 if family == "Bert" else VOCABULARY
    weights = torch.randn(3, TOKENS, width, generator=torch.manual_seed(2), dtype=torch.float64)
    weights *= batch.get("attention_mask", torch.ones(3, TOKENS)).unsqueeze(-1)  # not of padding
    output, gradients = _passes(with_attention(make_model(family), "sdpa"), batch, weights)
    of_whole = {"output": output, "weights": weights}
    wanted = _part(of_whole, rank)
    model = with_attention(make_model(family), "cqs-of-group")
    found, parts = _passes(model, _part(batch, rank), wanted["weights"])
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
    """Return what is raised where positions are missing, and for packed sequences and caches."""
    register("cqs-of-group", group=group)
    rank, batch = dist.get_rank(group), BATCHES["whole"]()
    model = with_attention(make_model("Llama"), "cqs-of-group")
    part = _part(batch, rank)
    found = {"positions": _complaint(lambda: model(**part))}
    packed = BATCHES["packed"]()
    found["packed"] = _complaint(lambda: model(**packed))
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
