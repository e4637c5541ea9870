"""Attention inside a torch.distributed group: every rank passes its shard and gets its shard."""

from cqs.distributed.attention import attention

__all__ = ["attention"]
