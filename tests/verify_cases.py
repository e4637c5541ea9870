"""Problems whose right answers must pass verification, drawn by seed."""

import random

import torch

import cqs
from cqs.patterns import dilated, global_tokens, longformer, sliding_window

KINDS = {
    "normal": lambda q, k, v: (q, k, v),
    "equal columns": lambda q, k, v: (*(t[..., :1].expand_as(t) for t in (q, k)), v),
    "positive": lambda q, k, v: (q.abs(), k.abs(), v.abs()),
    "a third": lambda q, k, v: (torch.full_like(q, 1 / 3), torch.full_like(k, 0.7), v),
    "equal values": lambda q, k, v: (q, k, torch.full_like(v, 0.7)),
    "equal scores": lambda q, k, v: (0 * q, k, torch.full_like(v, 1 / 3)),
    "large scores": lambda q, k, v: (30 * q, 30 * k, v),
    "huge scores": lambda q, k, v: (1e4 * q, 1e4 * k, v),
    "tiny": lambda q, k, v: (1e-4 * q, 1e-4 * k, 1e-6 * v),
    "tiniest": lambda q, k, v: (1e-30 * q, k, 1e-38 * v),
    "cancelling": lambda q, k, v: (
        torch.cat([q, q], -1)[..., : q.shape[-1]] * 20,
        torch.cat([k[..., ::2], -k[..., ::2]], -1)[..., : k.shape[-1]] * 20,
        v - v.mean(dim=2, keepdim=True),
    ),
    "alternating": lambda q, k, v: (
        q,
        k,
        100 * (1 - 2 * (torch.arange(v.shape[2])[:, None] % 2)) + v,
    ),
    "one outlier": lambda q, k, v: (
        q,
        torch.cat([k[:, :, :-1], 50 * k[:, :, -1:]], 2),
        torch.cat([v[:, :, :-1], 1e4 * v[:, :, -1:]], 2),
    ),
}
PATTERNS = (
    sliding_window(20, 3),
    sliding_window(4, 4) | global_tokens(1),
    longformer(16, [3]),
    dilated(8, 0, 3),
)


def draw(seed):
    """Return a description, the tensors and the options of a call of at most 3000 keys."""
    choose = random.Random(seed)
    kind = choose.choice(list(KINDS))
    dtype = choose.choice([torch.float32] * 3 + [torch.float64, torch.bfloat16, torch.float16])
    head_dim = choose.choice([1, 5, 8, 16, 64, 64, 128, 512, 1024, 4096])
    seqlen_q = choose.choice([1, 2, 3, 7, 31, 53, 128])
    seqlen_kv = choose.choice([seqlen_q, seqlen_q, 1, 40, 600, 3000 if head_dim <= 128 else 100])
    num_heads = choose.choice([1, 2])
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(1, heads, length, head_dim, generator=generator)
        for heads, length in ((num_heads, seqlen_q), (1, seqlen_kv), (1, seqlen_kv))
    ]
    tensors = [each.to(dtype) for each in KINDS[kind](*tensors)]
    options = {
        "num_tasks": choose.choice([1, 2, 3, 7, 8, 13, 31, 53]),
        "is_causal": choose.random() < 0.4,
        "backend": choose.choice([None, None, "reference"]),
    }
    if seqlen_q == seqlen_kv > 2 and choose.random() < 0.3:
        options["pattern"] = choose.choice(PATTERNS)
    elif choose.random() < 0.15:
        options |= {"dropout_p": 0.3, "seed": seed, "backend": None}
    if dtype == torch.float64:
        options["backend"] = None
    shape = f"{seqlen_q} x {seqlen_kv}, head_dim {head_dim}, {dtype}, {options}"
    return f"seed {seed}: {kind}, {shape}", tensors, options


def compute(tensors, options):
    return cqs.attention(*tensors, return_lse=True, verify=True, **options)
