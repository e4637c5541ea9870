"""Random options of the scores, and attention with them by its definition, in any dtype."""

from dataclasses import replace

import torch
from support.exact import assert_tracks_exact

import cqs
from benchmarks.cases import visible_mask


def define(problem, scores, factors=1.0):
    """Output and LSE from the definition: changed scores, and a softmax with a column of sinks."""
    group_size = problem.query.shape[1] // problem.key.shape[1]
    key, value = (t.repeat_interleave(group_size, 1) for t in (problem.key, problem.value))
    found = problem.scale * problem.query @ key.mT
    _, num_heads, seqlen_q, seqlen_kv = found.shape
    batches, heads, queries, keys = (
        torch.arange(size, device=found.device).view(-1, *[1] * (3 - dim))
        for dim, size in enumerate(found.shape)
    )
    if scores.softcap is not None:
        found = scores.softcap * torch.tanh(found / scores.softcap)
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.to(found.dtype).view(-1, num_heads)
        found = found - slopes[..., None, None] * (queries + seqlen_kv - seqlen_q - keys).abs()
    if scores.bias is not None:
        found = found + scores.bias.to(found.dtype)
    if scores.score_mod is not None:
        found = scores.score_mod(found, batches, heads, queries, keys).to(found.dtype)
    if (mask := visible_mask(problem)) is not None:
        found = found.masked_fill(~mask, -torch.inf)
    sinks = scores.sinks if scores.sinks is not None else found.new_full((num_heads,), -torch.inf)
    column = sinks.to(found.dtype).view(-1, 1, 1).expand(*found.shape[:3], 1)
    whole = torch.cat([found, column], -1)
    is_blind = (whole == -torch.inf).all(-1)
    weights = whole.masked_fill(is_blind.unsqueeze(-1), 0).softmax(-1)[..., :-1] * factors
    lse = whole.masked_fill(is_blind.unsqueeze(-1), 0).logsumexp(-1)
    visible = (~is_blind).to(found.dtype).unsqueeze(-1)
    return (weights * visible) @ value, lse.masked_fill(is_blind, -torch.inf)


def relative(table):
    """A learned bias of the distance, as of T5."""
    return lambda score, batch, head, query, key: score + table[head, query - key + 1024]


def scaled(table):
    """A function that changes scores by batch element, head and positions."""

    def score_mod(score, batch, head, query, key):
        return torch.where((query + key) % 5 == 0, score * (1 + 0.1 * batch), score - 0.02 * head)

    return score_mod


class Drawn:
    """Random options of the scores of a problem, with new leaves on each call of ``make``."""

    def __init__(self, problem, generator, names=()):
        """Draw the options of these names."""
        batch, num_heads, seqlen_q, _ = problem.query.shape
        self.seed = generator.randrange(2**31)
        self.dtype, self.device = problem.query.dtype, problem.query.device
        self.sinks = (num_heads,) if "sinks" in names else None
        self.softcap = generator.choice([0.5, 3.0]) if "softcap" in names else None
        shapes = [(num_heads,), (batch, num_heads)]
        self.slopes = generator.choice(shapes) if "alibi_slopes" in names else None
        self.has_slopes_gradient = False
        self.bias = (num_heads, seqlen_q, problem.key.shape[2]) if "bias" in names else None
        self.has_bias_gradient = True
        self.score_mod = generator.choice([relative, scaled]) if "score_mod" in names else None
        self.table = (num_heads, 2048)

    def make(self, dtype=None):
        """Scores of the problem's dtype converted to another, and leaves that require gradients."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(shape, requires_grad=True):
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            drawn = drawn.to(self.device, self.dtype).to(dtype or self.dtype)
            return drawn.requires_grad_(requires_grad)

        sinks = None if self.sinks is None else draw(self.sinks)
        slopes = None if self.slopes is None else draw(self.slopes, False).abs() / 8
        if slopes is not None:
            slopes = slopes.requires_grad_() if self.has_slopes_gradient else slopes.float()
        bias = None if self.bias is None else draw(self.bias, self.has_bias_gradient)
        table = None if self.score_mod is None else draw(self.table)
        score_mod = None if table is None else self.score_mod(table)
        scores = cqs.Scores(sinks, self.softcap, slopes, bias, score_mod)
        leaves = [
            leaf
            for leaf in (sinks, bias, table if self.score_mod is relative else None, slopes)
            if leaf is not None and leaf.requires_grad
        ]
        return scores, leaves


def tensors_of(problem):
    """Query, key and value as new leaves."""
    return [t.detach().requires_grad_() for t in (problem.query, problem.key, problem.value)]


def options_of(problem):
    """The options of a problem besides its scores."""
    return {"is_causal": problem.is_causal, "pattern": problem.pattern, "scale": problem.scale}


def gradient_of_output(output):
    """A random gradient of the output, equal for every dtype up to rounding."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)


def with_gradients(compute, tensors, leaves):
    """Output, LSE, and the gradients of a random function of the output."""
    output, lse = compute(*tensors)
    found = torch.autograd.grad(
        output, (*tensors, *leaves), gradient_of_output(output), materialize_grads=True
    )
    return [output, lse, *found]


def factors_of(problem, **dropout):
    """Factors of dropout on the weights."""
    tensors = problem.query, problem.key, problem.value
    dropped = cqs.problem.check_problem(*tensors, **dropout).dropout
    ranges = [range(problem.query.shape[2])], [range(problem.key.shape[2])]
    bits = dropped.random_bits(problem.query, *ranges)
    return dropped.kept(bits).to(problem.query.dtype) * dropped.scale


def expected(problem, drawn, factors=1.0, dtype=None):
    """Output, LSE and gradients by the definition."""
    scores, leaves = drawn.make(dtype)

    def compute(query, key, value):
        return define(replace(problem, query=query, key=key, value=value), scores, factors)

    return with_gradients(compute, tensors_of(problem), leaves)


def compute_by(call, problem, drawn, **options):
    """Output, LSE and gradients of a function of cqs."""
    scores, leaves = drawn.make()
    given = options_of(problem) | options | {"return_lse": True, "scores": scores}

    def compute(*tensors):
        return call(*tensors, **given)

    return with_gradients(compute, tensors_of(problem), leaves)


def assert_equal(found, exact, tolerance=1e-9):
    torch.testing.assert_close(list(found), list(exact), rtol=tolerance, atol=tolerance)


def assert_tracks_definition(found, problem, drawn, slack):
    """Compare output, LSE (or None) and gradients with float64."""
    wide = {name: getattr(problem, name).double() for name in ("query", "key", "value")}
    exact = expected(replace(problem, **wide), drawn, dtype=torch.float64)
    for got, plain, right in zip(found, expected(problem, drawn), exact, strict=True):
        if got is not None and problem.query.dtype == torch.float64:
            torch.testing.assert_close(got, right)
        elif got is not None:
            assert_tracks_exact(got, plain, right, slack=slack)
