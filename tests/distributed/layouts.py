"""Layouts of all ranks of a call."""

from cqs.executors.distributed.layout import lay_out
from cqs.scheduler.machines import FETCHED

DEFAULTS = {
    "head_parallel": "auto",
    "num_chunks": None,
    "is_causal": False,
    "pattern": None,
    "plan": "quorums",
    "tile": 1,
    "chunk_rule": FETCHED,
    "with_gradients": False,
}


def lay_out_all(shape, seqlens_q, seqlens_kv=None, **options):
    """Return the layout of every rank.

    Args:
        shape: Shape of the attention.
        seqlens_q: Number of queries of every rank.
        seqlens_kv: Number of keys of every rank; by default that of its queries.
        **options: Arguments of ``lay_out`` that are not the defaults.
    """
    lengths, options = (seqlens_q, seqlens_kv or seqlens_q), DEFAULTS | options
    return [lay_out(*lengths, rank, shape, **options) for rank in range(len(seqlens_q))]
