"""Context-parallel attention for torch.distributed: each rank passes and receives its shard."""

from cqs.executors.distributed.attention import attention

__all__ = ["attention"]
