"""FlashAttention: the parameter grid of its test of outputs and gradients, and its reference.

The whole grid is for GPUs. A CPU computes smaller batches, and the lengths up to 256.
"""

from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import cqs
from cqs.patterns import causal, from_mask, sliding_window

from .framework import NUM_TASKS, Case, Suite, heads_first, with_gradients
from .sources import module_of, unpacked

VERSION = "4.0.0b36"
_LENGTHS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (113, 203), (113, 128), (128, 217)),
    *((113, 211), (108, 256), (799, 3), (256, 512), (384, 256), (640, 128), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224)),
)
_HEADS = {"mha": 6, "gqa": 3, "mqa": 1}
"""Kind -> number of KV heads for six query heads."""


def suite():
    """Return the grid for the GPU, or its part for the CPU."""
    # Its place differs between the wheel and the source distribution.
    (path,) = unpacked(f"flash-attn-4=={VERSION}").rglob("testing.py")
    testing = module_of(path)
    return Suite("FlashAttention", f"flash-attn-4 {VERSION}", _cases(testing.attention_ref))


def _cases(reference):
    has_gpu = torch.cuda.is_available()
    grid = product(
        _LENGTHS if has_gpu else _LENGTHS[:10],
        (64, 96, 128) if has_gpu else (64,),
        (torch.bfloat16, torch.float16),
        _HEADS,
        ({}, {"causal": True}, {"local": True}, {"chunk": True}, {"softcap": 15.0}, {"sink": True}),
    )
    for lengths, head_dim, dtype, kind, options in grid:
        name = f"{lengths} d={head_dim} {dtype} {kind} {options}"
        check = partial(_check, reference, lengths, head_dim, dtype, _HEADS[kind], options)
        yield Case(name, check)


def _check(reference, lengths, head_dim, dtype, num_kv_heads, options):
    """Apply the rule of the test: an error is at most twice that of PyTorch in this dtype.

    PyTorch is the reference in this dtype, and on a CPU also scaled_dot_product_attention: cqs
    calls the same kernel, which sums gradients in half precision. Absolute errors of 1e-5 are
    allowed, as by ``torch.testing``: for a single key dQ is exactly 0.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = 9 if device == "cuda" else 1
    shapes = [(batch, lengths[0], 6, head_dim)]
    shapes += [(batch, lengths[1], num_kv_heads, head_dim)] * 2
    operands = [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]
    softcap = options.get("softcap", 0.0)
    if softcap:
        operands[0] = (operands[0] * softcap / 4).detach().requires_grad_()
    asked = {"causal": options.get("causal", False), "softcap": softcap}
    ours = {"is_causal": asked["causal"]}
    if options.get("local"):
        asked["window_size"] = tuple(torch.randint(0, lengths[1], (2,)).tolist())
        ours["pattern"] = sliding_window(*asked["window_size"])
    if options.get("chunk"):
        asked["attention_chunk"] = int(torch.randint(1, 2 * lengths[1], ()))
        ours["pattern"] = _chunks(asked["attention_chunk"], lengths)
    if options.get("sink"):
        asked["learnable_sink"] = torch.randn(6, dtype=torch.bfloat16, device=device)
        ours["scores"] = cqs.Scores(sinks=asked["learnable_sink"])
    if softcap:
        ours["scores"] = cqs.Scores(softcap=softcap)
    found = with_gradients(partial(_by_cqs, num_tasks=NUM_TASKS, **ours), operands)
    exact = with_gradients(lambda *each: reference(*each, **asked)[0], operands)
    plain = partial(reference, upcast=False, reorder_ops=True, **asked)
    eager = with_gradients(lambda *each: plain(*each)[0], operands)
    peers = [eager]
    if device == "cpu":
        peers.append(with_gradients(partial(_by_pytorch, ours, lengths), operands))
    for part, name in enumerate(("O", "dQ", "dK", "dV")):
        got, want = found[part], exact[part]
        worst = max((peer[part] - want).abs().max() for peer in peers)
        allowed = 2 * worst + 2 * (want + 0.3 - 0.3 - want).abs().max()
        error = (got - want).abs().max()
        assert error <= allowed + 1e-5, f"{name}: error {error:.3g} > {allowed:.3g}"


_by_cqs = heads_first(cqs.attention)


def _by_pytorch(options, lengths, *operands):
    pattern = causal() if options["is_causal"] else sliding_window(None, None)
    mask = torch.from_numpy(options.get("pattern", pattern).to_mask(*lengths))
    attend = heads_first(F.scaled_dot_product_attention)
    return attend(*operands, attn_mask=mask, enable_gqa=True)


def _chunks(size, lengths):
    """Return the pattern in which a query sees the keys of its chunk, also later ones."""
    position = torch.arange(lengths[0])[:, None] + lengths[1] - lengths[0]
    start = position - position % size
    key = torch.arange(lengths[1])
    return from_mask((key >= start) & (key < start + size))
