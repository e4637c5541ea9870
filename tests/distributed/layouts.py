"""Layouts of all ranks of a call."""

from cqs.executors.distributed.layout import ShardedWork, lay_out


def lay_out_all(shape, seqlens_q, seqlens_kv=None, **options):
    """Return the layout of every rank.

    Args:
        shape: Shape of the attention.
        seqlens_q: Number of queries of every rank.
        seqlens_kv: Number of keys of every rank; by default that of its queries.
        **options: Other fields of ``ShardedWork``.
    """
    options = {"plan": "quorums"} | options
    work = ShardedWork(seqlens_q, seqlens_kv or seqlens_q, shape, **options)
    return [lay_out(work, rank) for rank in range(len(seqlens_q))]
