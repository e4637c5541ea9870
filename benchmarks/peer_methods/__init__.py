"""Ways to spread one attention problem over ranks, each as good as we know it, around one kernel.

A shard is ``[batch, heads, rows, dim]`` with rows first in memory, as projections give it to a
batch of one, and of as many rows on every rank: then tokens need no copy to travel, but between
heads. Whatever can travel beside a computation is launched before it.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.peer_methods.all_gather import AllGather
from benchmarks.peer_methods.alone import One
from benchmarks.peer_methods.context_parallel import Torch
from benchmarks.peer_methods.method import Method
from benchmarks.peer_methods.quorums import Cqs
from benchmarks.peer_methods.replayed import Replayed
from benchmarks.peer_methods.ring import Ring
from benchmarks.peer_methods.ulysses import Ulysses

METHODS: dict[str, Callable[..., Method]] = {
    "one": One,
    "one each": partial(One, each=True),
    "cqs": Cqs,
    "cqs replayed": Replayed,
    "cqs quorums": partial(Cqs, head_parallel=1),
    "ring": Ring,
    "all-gather": AllGather,
    "ulysses": Ulysses,
    "ulysses in two": partial(Ulysses, num_parts=2),
    "torch": Torch,
    "torch all-to-all": partial(Torch, rotate="alltoall"),
}
"""By name, what makes one from a group, a worker and ``is_causal``."""
