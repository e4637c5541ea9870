"""Context-parallel attention for torch.distributed: each rank passes and receives its shard."""

from cqs.executors.distributed.attention import PreparedAttention, attention, prepare

__all__ = ["PreparedAttention", "attention", "prepare"]
