"""Methods of context parallelism around one kernel, each as fast as we can make it.

A shard is ``[batch, heads, rows, dim]`` with rows first in memory, as projections return it for a
batch of one. Every rank has the same number of rows. Tokens are then sent without a copy, except
between heads. Communication that can overlap a computation is launched before it.
"""

from collections.abc import Callable
from functools import partial

from benchmarks.peer_methods.all_gather import AllGather
from benchmarks.peer_methods.alone import One
from benchmarks.peer_methods.context_parallel import Torch
from benchmarks.peer_methods.method import Method
from benchmarks.peer_methods.quorums import Cqs
from benchmarks.peer_methods.ring import Ring
from benchmarks.peer_methods.ulysses import PaddedUlysses, Ulysses

METHODS: dict[str, Callable[..., Method]] = {
    "one": One,
    "cqs": Cqs,
    "cqs quorums": partial(Cqs, head_parallel=1),
    "cqs limited": partial(Cqs, is_limited=True),
    "ring": Ring,
    "all-gather": AllGather,
    "all-gather whole": partial(AllGather, cuts_documents=False),
    "grid": partial(Cqs, plan="grid", head_parallel=1),
    "ulysses": Ulysses,
    "ulysses in two": partial(Ulysses, num_chunks=2),
    "ulysses padded": PaddedUlysses,
    "torch": Torch,
}
"""Name of a method -> function that makes it from a process group, a problem and a backend."""
