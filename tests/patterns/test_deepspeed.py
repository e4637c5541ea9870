"""DeepSpeed's configurations, each against its definition by blocks."""

import pickle
import random

import numpy as np
import pytest
from brute_force import assert_is

from cqs.patterns import causal, from_deepspeed


def config_class(name, **defaults):
    """A class with the name and the attributes of DeepSpeed's."""

    def make(self, num_heads, block=16, different_layout_per_head=False, **parameters):
        self.num_heads, self.block = num_heads, block
        self.different_layout_per_head = different_layout_per_head
        for key, value in {**defaults, **parameters}.items():
            setattr(self, key, value)

    return type(name, (), {"__init__": make})


Dense = config_class("DenseSparsityConfig")
Fixed = config_class(
    "FixedSparsityConfig",
    num_local_blocks=4,
    num_global_blocks=1,
    attention="bidirectional",
    horizontal_global_attention=False,
    num_different_global_patterns=1,
)
Variable = config_class(
    "VariableSparsityConfig",
    num_random_blocks=0,
    local_window_blocks=[4],
    global_block_indices=[0],
    global_block_end_indices=None,
    attention="bidirectional",
    horizontal_global_attention=False,
)
BigBird = config_class(
    "BigBirdSparsityConfig",
    num_random_blocks=1,
    num_sliding_window_blocks=3,
    num_global_blocks=1,
    attention="bidirectional",
)
BSLongformer = config_class(
    "BSLongformerSparsityConfig",
    num_sliding_window_blocks=3,
    global_block_indices=[0],
    global_block_end_indices=None,
    attention="bidirectional",
)
Local = config_class(
    "LocalSlidingWindowSparsityConfig", num_sliding_window_blocks=3, attention="unidirectional"
)


def is_causal(c):
    return getattr(c, "attention", "") == "unidirectional"


def in_fixed(c, head, n):
    size, width = c.num_local_blocks, c.num_global_blocks
    first = size - (1 + head % c.num_different_global_patterns) * width
    starts = [group + first for group in range(0, n - n % size, size)]
    if n % size:
        starts.append(min(n - n % size + first, n - width))
    summaries = [range(n)[start : start + width] for start in starts]

    def rule(row, column):
        local = row // size == column // size and (column <= row or not is_causal(c))
        seen = any(column in each and (row >= each[0] or not is_causal(c)) for each in summaries)
        sees = c.horizontal_global_attention and any(row in each for each in summaries)
        return local or seen or sees

    return rule


def global_runs(c, n):
    """First and last + 1, as indices and slices of an array of n blocks have them."""
    starts = c.global_block_indices
    if c.global_block_end_indices is None:
        return [(s % n, s % n + 1) for s in starts if s < n]
    ends = zip(starts, c.global_block_end_indices, strict=True)
    return [slice(*run).indices(n)[:2] for run in ends]


def in_variable(c, head, n):
    sizes = list(c.local_window_blocks)
    while sum(sizes) < n:
        sizes.append(sizes[-1])
    group = [number for number, size in enumerate(sizes) for _ in range(size)]

    def rule(row, column):
        local = group[row] == group[column] and (column <= row or not is_causal(c))
        runs = global_runs(c, n)
        seen = any(a <= column < b and (row >= a or not is_causal(c)) for a, b in runs)
        sees = c.horizontal_global_attention and any(a <= row < b for a, b in runs)
        return local or seen or sees

    return rule


def in_bigbird(c, head, n):
    def rule(row, column):
        near = abs(row - column) <= c.num_sliding_window_blocks // 2
        anywhere = near or min(row, column) < c.num_global_blocks
        return anywhere and (column <= row or not is_causal(c))

    return rule


def in_bslongformer(c, head, n):
    def rule(row, column):
        near = abs(row - column) <= c.num_sliding_window_blocks // 2
        named = any(a <= row < b or a <= column < b for a, b in global_runs(c, n))
        return (near or named) and (column <= row or not is_causal(c))

    return rule


def in_local(c, head, n):
    side = c.num_sliding_window_blocks // 2
    return lambda row, column: row - side <= column <= (row if is_causal(c) else row + side)


def random_layout(c, head, n):
    """What the random module draws right after its seed, heads and rows one after another."""
    layout = np.zeros((n, n), dtype=bool)
    if not getattr(c, "num_random_blocks", 0):
        return layout
    random.seed(5)
    everywhere = type(c) is Variable or not is_causal(c)
    for _ in range(head + 1):
        layout[:] = False
        for row in range(n):
            choices = range(n) if everywhere else range(row + 1)
            layout[row, random.sample(choices, c.num_random_blocks)] = True
    return layout & np.tri(n, dtype=bool) if type(c) is BigBird and is_causal(c) else layout


UNIDIRECTIONAL = {"attention": "unidirectional"}
BY_HEAD = {"different_layout_per_head": True}
CASES = [
    (Dense(3), lambda c, head, n: lambda row, column: True),
    (Fixed(3), in_fixed),
    (Fixed(3, **UNIDIRECTIONAL), in_fixed),
    (Fixed(3, block=8, num_local_blocks=6, num_global_blocks=2), in_fixed),
    (Fixed(3, horizontal_global_attention=True), in_fixed),
    (Fixed(3, num_local_blocks=12, num_global_blocks=12, **UNIDIRECTIONAL), in_fixed),
    (Fixed(3, num_local_blocks=48, num_global_blocks=16, **UNIDIRECTIONAL), in_fixed),
    (Fixed(5, **BY_HEAD, num_different_global_patterns=4), in_fixed),
    (Variable(3, local_window_blocks=[1, 3, 2], global_block_indices=[0, 5, 90]), in_variable),
    (Variable(3, num_random_blocks=2, **UNIDIRECTIONAL), in_variable),
    (
        Variable(
            3,
            global_block_indices=[1, 6],
            global_block_end_indices=[3, 7],
            horizontal_global_attention=True,
        ),
        in_variable,
    ),
    (Variable(3, global_block_indices=[-1, 3, -4], **UNIDIRECTIONAL), in_variable),
    (
        Variable(3, global_block_indices=[-3, 2, -5], global_block_end_indices=[-1, 4, 9]),
        in_variable,
    ),
    (BigBird(3), in_bigbird),
    (BigBird(3, num_sliding_window_blocks=5, num_global_blocks=2, **UNIDIRECTIONAL), in_bigbird),
    (BigBird(3, num_random_blocks=2, **BY_HEAD), in_bigbird),
    (BSLongformer(3), in_bslongformer),
    (BSLongformer(3, global_block_indices=[2, 4], **UNIDIRECTIONAL), in_bslongformer),
    (
        BSLongformer(3, global_block_indices=[2], global_block_end_indices=[5]),
        in_bslongformer,
    ),
    (BSLongformer(3, global_block_indices=[-2]), in_bslongformer),
    (Local(3), in_local),
    (Local(3, block=32, num_sliding_window_blocks=4, attention="bidirectional"), in_local),
]


@pytest.mark.parametrize(
    ("config", "definition"), CASES, ids=[type(config).__name__ for config, _ in CASES]
)
@pytest.mark.parametrize("length", [160, 416])
def test_layouts_are_those_of_deepspeed(config, definition, length):
    pattern = from_deepspeed(config, seed=5)
    heads = config.num_heads if config.different_layout_per_head else 1
    assert pattern.heads == (1, heads)
    num_blocks = -(-length // config.block)
    for head in {0, heads - 1}:
        rule = definition(config, head, num_blocks)
        layout = np.array([[rule(i, j) for j in range(num_blocks)] for i in range(num_blocks)])
        layout |= random_layout(config, head, num_blocks)
        mask = layout.repeat(config.block, axis=0).repeat(config.block, axis=1)
        bound = pattern.head(0, head).bind(length)
        assert_is(random.Random(0), bound, mask[:length, :length])


def test_a_configuration_file_is_read():
    section = {"mode": "fixed", "block": 32, "num_local_blocks": 2, "num_sliding_window_blocks": 9}
    pattern = from_deepspeed({"train_batch_size": 8, "sparse_attention": section})
    assert pattern == from_deepspeed(section) == from_deepspeed(Fixed(4, 32, num_local_blocks=2))
    assert from_deepspeed({"mode": "dense"}).density(256) == 1
    by_head = from_deepspeed(
        {**section, **BY_HEAD, "num_different_global_patterns": 2}, num_heads=6
    )
    assert by_head.heads == (1, 6)


def test_files_have_the_defaults_of_files():
    assert from_deepspeed({"mode": "bigbird"}) == from_deepspeed(BigBird(1, num_random_blocks=0))
    both_ways = from_deepspeed({"mode": "bslongformer", **UNIDIRECTIONAL})
    assert both_ways == from_deepspeed(BSLongformer(1))


def test_regular_modes_of_a_billion_tokens_are_a_few_pieces():
    n = 10**9
    for config in (Fixed(1, **UNIDIRECTIONAL), BigBird(1, num_random_blocks=0), BSLongformer(1)):
        bound = from_deepspeed(config).bind(n)
        assert len(bound.pieces) < 40 and bound.blocks is None
        assert 0 < bound.num_pairs < n * n


@pytest.mark.slow
def test_random_modes_list_their_blocks_alone():
    blocks = from_deepspeed({"mode": "bigbird", "num_random_blocks": 1}).bind(200_000).blocks
    assert blocks.counts.sum() <= 12_500 * 256 and len(blocks.ids) <= 12_500


def test_a_summary_wider_than_the_sequence_hides_the_future():
    layout = {"mode": "fixed", "block": 1, "num_local_blocks": 3, "num_global_blocks": 3}
    pattern = from_deepspeed({**layout, **UNIDIRECTIONAL})
    assert pattern.to_mask(2).astype(int).tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("config", [config for config, _ in CASES])
def test_what_is_read_prints_as_the_call_that_makes_it(config):
    for pattern in (from_deepspeed(config, seed=5), from_deepspeed({"mode": "bigbird"})):
        for head in range(pattern.heads[1]):
            assert eval(repr(pattern.head(0, head))) == pattern.head(0, head)


def test_parameters_may_be_arrays():
    arrays = {"local_window_blocks": np.array([2, 3]), "global_block_indices": np.array([1])}
    lists = {"local_window_blocks": [2, 3], "global_block_indices": (1,)}
    mode = {"mode": "variable"}
    assert from_deepspeed(mode | arrays) == from_deepspeed(mode | lists)


def test_subclasses_are_read_as_their_base():
    class Mine(Fixed):
        pass

    assert from_deepspeed(Mine(2)) == from_deepspeed(Fixed(2))


def test_a_unidirectional_layout_combines_with_causal():
    pattern = from_deepspeed(Fixed(1, **UNIDIRECTIONAL)) & causal()
    mask = pattern.to_mask(200)
    assert (mask == np.tril(mask)).all() and mask.diagonal().all()
    assert pickle.loads(pickle.dumps(pattern)) == pattern


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_deepspeed(3), "config must be a dict or one of .*'BSLongformerSparsity"),
        (lambda: from_deepspeed({"mode": "odd"}), "mode must be one of .*, got 'odd'"),
        (lambda: from_deepspeed(BY_HEAD), "num_heads must be given"),
        (lambda: from_deepspeed({"attention": "up"}), "attention must be .*, got 'up'"),
        (lambda: from_deepspeed({"block": 0}), "block must be at least 1, got 0"),
        (lambda: from_deepspeed({"num_global_blocks": 3}), "num_global_blocks must divide"),
        (
            lambda: from_deepspeed({"num_different_global_patterns": 2}),
            "num_different_global_patterns must be at most 1, got 2",
        ),
        (
            lambda: from_deepspeed(Fixed(1, **UNIDIRECTIONAL, horizontal_global_attention=True)),
            "horizontal_global_attention must be False",
        ),
        (
            lambda: from_deepspeed(BSLongformer(1, global_block_end_indices=[0])),
            "global_block_end_indices must be",
        ),
        (lambda: from_deepspeed({"mode": "local"}), "mode must be one of .*, got 'local'"),
        (
            lambda: from_deepspeed({"horizontal_global_attention": "false"}),
            "horizontal_global_attention must be a bool, got 'false'",
        ),
        (lambda: from_deepspeed({"num_local_blocks": -4}), "num_local_blocks must be at least 1"),
        (lambda: from_deepspeed({"num_local_blocks": "4"}), "num_local_blocks must be an integer"),
        (lambda: from_deepspeed({"num_global_blocks": 0}), "num_global_blocks must divide"),
        (
            lambda: from_deepspeed({"num_different_global_patterns": 0}),
            "num_different_global_patterns must be at least 1, got 0",
        ),
        (
            lambda: from_deepspeed({"mode": "variable", "local_window_blocks": []}),
            r"local_window_blocks must have an element, got \[\]",
        ),
        (
            lambda: from_deepspeed({"mode": "variable", "local_window_blocks": [2, 0]}),
            "local_window_blocks must be at least 1, got 0",
        ),
        (
            lambda: from_deepspeed({"mode": "variable", "local_window_blocks": 4}),
            "local_window_blocks must be a sequence of integers, got 4",
        ),
        (
            lambda: from_deepspeed({"mode": "variable", "global_block_indices": [0.5]}),
            "global_block_indices must be an integer, got 0.5",
        ),
        (
            lambda: from_deepspeed(BSLongformer(1, global_block_indices=[-9])).bind(128),
            r"global_block_indices must be at least -8, got \[-9\]",
        ),
        (
            lambda: from_deepspeed(BigBird(1, num_random_blocks=2, **UNIDIRECTIONAL)),
            "num_random_blocks must be at most 1 .*, got 2",
        ),
        (
            lambda: from_deepspeed(BigBird(1, num_random_blocks=9)).bind(128),
            "num_random_blocks must be at most .* 8, got 9",
        ),
        (
            lambda: from_deepspeed(BigBird(1, num_global_blocks=9)).bind(128),
            "num_global_blocks must be at most .* 8, got 9",
        ),
        (
            lambda: from_deepspeed(Variable(1, num_random_blocks=9)).bind(128),
            "num_random_blocks must be at most .* 8, got 9",
        ),
        (
            lambda: from_deepspeed(BSLongformer(1, num_sliding_window_blocks=9)).bind(128),
            "num_sliding_window_blocks must be at most .* 8, got 9",
        ),
        (lambda: from_deepspeed({"sparse_attention": None}), "must be a dict, got None"),
        (lambda: from_deepspeed({"sparse_attention": 5}), "must be a dict, got 5"),
        (lambda: from_deepspeed({"mode": ["fixed"]}), "mode must be one of"),
        (lambda: from_deepspeed(Local(1)).bind(16), "num_sliding_window_blocks must be at most"),
        (
            lambda: from_deepspeed(Fixed(1)).bind(32, 16),
            r"requires self-attention.* got .*\(32, 16\)",
        ),
        (lambda: from_deepspeed(Fixed(1)).allows(0, 0), "depends on the lengths"),
    ],
)
def test_bad_configurations_are_named(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
