"""Patterns and problems that tests of attention with patterns share."""

from dataclasses import replace

import torch
from score_cases import with_gradients
from support.exact import assert_tracks_exact, attend, eager_output, exact_answer, tensors_of

from cqs.patterns import (
    acsr,
    bigbird,
    block_diagonal,
    block_sparse,
    causal,
    dilated,
    documents,
    fixed,
    from_mask,
    global_tokens,
    longformer,
    sliding_window,
    strided,
)


def random_bits(*shape, share=0.3):
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < share


PATTERNS = {
    "causal-window": sliding_window(40, 0),
    "window": sliding_window(9, 23),
    "ahead": sliding_window(0, None),
    "dilated": dilated(5, 3, 4),
    "strided": strided(8),
    "strided-ragged": strided(7),
    "fixed": fixed(16, 3),
    "fixed-wide": fixed(50, 2),
    "block-diagonal": block_diagonal(20),
    "global": global_tokens([0, 3, 70]),
    "longformer": longformer(30, 5),
    "bigbird": bigbird(block=16, window_blocks=3, global_blocks=1, random_blocks=2, seed=3),
    "union": dilated(3, 0, 8) | sliding_window(4, 0),
    "difference": causal() - sliding_window(12, 0),
    "nothing": sliding_window(0, 0) - sliding_window(0, 0),
}


def packed(seqlen_q, seqlen_kv, **options):
    """Documents of unequal lengths where the sequences are."""
    sides = [[0, n // 4, n // 3, n // 3 + n // 70, n - n // 6, n] for n in (seqlen_q, seqlen_kv)]
    return documents(*(sides[:1] if seqlen_q == seqlen_kv else sides), **options)


FOR_LENGTHS = {
    "documents": packed,
    "documents-both-ways": lambda q, k: packed(q, k, is_causal=False),
    "block-sparse": lambda q, k: block_sparse(random_bits(-(-q // 16), -(-k // 16)), 16),
    "mask": lambda q, k: from_mask(random_bits(q, k)),
    "mostly-blind": lambda q, k: from_mask(random_bits(q, k, share=0.01)),
    "acsr": lambda q, k: acsr([i // 3 for i in range(q)], [2] * q, [k // 8] * q),
}
"""For sequences of given lengths only."""
NAMES = [*PATTERNS, *FOR_LENGTHS]


def random_pattern(rng, seqlen, step, others=()):
    """Draw a pattern of any family, with parameters up to a little beyond a length, or another."""
    longest = rng.choice([9, seqlen + 1])
    left, right = (rng.choice([None, rng.randint(0, longest)]) for _ in range(2))
    tokens = rng.sample(range(seqlen + 4), rng.randint(0, 4))
    return rng.choice(
        [
            causal(),
            sliding_window(step),
            sliding_window(left, right),
            dilated(rng.randint(0, 4), rng.randint(0, 4), step),
            strided(step),
            fixed(step, rng.randint(0, step)),
            block_diagonal(step),
            global_tokens(tokens),
            sliding_window(3) | global_tokens([0, seqlen // 2]),
            longformer(rng.randint(0, 9), tokens),
            bigbird(block=rng.randint(3, 5), random_blocks=rng.randint(0, 3), seed=step),
            *others,
        ]
    )


def with_pattern(case, name):
    lengths = case.seqlen_q, case.seqlen_kv
    pattern = PATTERNS[name] if name in PATTERNS else FOR_LENGTHS[name](*lengths)
    return replace(case, pattern=pattern)


def assert_gradients_right(problem, **options):
    """Compare gradients by :func:`cqs.attention` with float64; in the dtype of the problem."""

    def gradients(compute, dtype=problem.query.dtype):
        def attend_to(query, key, value):
            return compute(replace(problem, query=query, key=key, value=value)), None

        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors_of(problem)]
        return with_gradients(attend_to, leaves, [])[2:]

    found = zip(
        gradients(lambda each: attend(each, **options)[0]),
        gradients(eager_output),
        gradients(lambda each: exact_answer(each).output, torch.float64),
        strict=True,
    )
    for name, grads in zip(("grad_query", "grad_key", "grad_value"), found, strict=True):
        assert_tracks_exact(*grads, slack=4, name=name)
