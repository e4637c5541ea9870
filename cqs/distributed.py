"""Context-parallel attention for torch.distributed: each rank passes and receives its shard."""

from cqs.executors.distributed.attention import PreparedAttention, attention, prepare
from cqs.executors.distributed.shards import JointTokens
from cqs.executors.distributed.strategy import Strategy

__all__ = ["JointTokens", "PreparedAttention", "Strategy", "attention", "prepare"]
