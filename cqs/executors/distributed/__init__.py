"""Attention over the shards of a process group: one task a rank, and the exchanges around it."""
