"""An attention problem as the cost model sees it: FLOPs, bytes of shards, and head chunks."""

from dataclasses import dataclass, replace

from cqs.scheduler.cost import AttentionShape
from cqs.scheduler.head_groups import possible_head_parallel
from cqs.scheduler.kinds import Kind, fit_kind
from cqs.scheduler.machines import FETCHED, ChunkRule, Machine

PASSES = {"forward": (False,), "backward": (True,), "both": (False, True)}
"""For each choice of ``passes``, whether each of its passes is a backward pass."""
_BACKWARD_ROWS = 6
"""Time per query row of a backward kernel relative to a forward kernel."""

_KEYS_OF_TILE, _LEAST_TILES = 128, 256
"""Keys of a tile of the backward kernel, and least tiles of a head chunk with a causal mask: tiles
then differ in length, and a GPU computes 132 at a time."""
_LATENCIES_OF_SHARD = 50
"""Head chunks are short enough if a link takes so many times its latency to send a shard."""


@dataclass(frozen=True)
class Workload:
    """The attention problem whose cost is predicted."""

    tokens: int
    """Number of queries."""
    shape: AttentionShape
    """Batch, heads, head dimensions and itemsize of the tensors."""
    is_causal: bool = False
    """Whether attention is causal."""
    num_keys: int | None = None
    """Number of keys; ``None`` means the number of queries."""
    num_pairs: float | None = None
    """Number of live pairs; ``None`` means all pairs, or half of them if causal."""

    def flops(self, *, is_backward: bool) -> float:
        """Return the FLOPs of live pairs: 4 d per pair and head forward, 10 d backward.

        The forward pass has two matrix products, the backward pass of FlashAttention-2 has five
        (Dao, arXiv 2307.08691).
        """
        shape, pairs = self.shape, self.num_pairs
        if pairs is None:
            pairs = self.tokens * self._keys / (2 if self.is_causal else 1)
        return (10 if is_backward else 4) * pairs * shape.head_dim * shape.num_heads * shape.batch

    def seconds(self, machine: Machine, *, is_backward: bool, calls: float = 1) -> float:
        """Return the seconds of one pass on one device.

        Args:
            machine: Throughput of the device.
            is_backward: Whether the pass is a backward pass.
            calls: Number of kernel calls that process each query, on average.
        """
        rate = machine.backward_rate if is_backward else machine.rate
        row = machine.per_row * (_BACKWARD_ROWS if is_backward else 1)
        rows = calls * self.tokens * self.shape.num_heads * self.shape.batch
        return self.flops(is_backward=is_backward) / rate + rows * row

    def one_device_seconds(self, machine: Machine, passes: str) -> float:
        """Return the seconds of the passes on one device.

        Args:
            machine: Throughput of the device.
            passes: ``"forward"``, ``"backward"`` or ``"both"``.
        """
        return sum(self.seconds(machine, is_backward=is_backward) for is_backward in PASSES[passes])

    def shard_bytes(self, num_devices: int, head_parallel: int = 1) -> tuple[int, int, int]:
        """Return the bytes of a shard's queries, of its keys and values, and of its results.

        Args:
            num_devices: Number of devices that share the tokens.
            head_parallel: Head-parallel degree; the bytes are those of one head group.
        """
        part = self.part(head_parallel)
        rows, keys = self.shard_rows(num_devices)
        return part.query_bytes(rows), part.key_bytes(keys), part.result_bytes(rows)

    def shard_rows(self, num_devices: int) -> tuple[int, int]:
        """Return the numbers of queries and of keys of a shard."""
        return -(-self.tokens // num_devices), -(-self._keys // num_devices)

    def part(self, head_parallel: int, num_chunks: int = 1) -> AttentionShape:
        """Return the shape of a head chunk of one head group.

        Groups share KV heads if there are fewer of these.
        """
        kv_heads = max(self.shape.kv_heads // head_parallel, 1) // num_chunks
        num_heads = self.shape.num_heads // head_parallel // num_chunks
        return replace(self.shape, num_heads=num_heads, num_kv_heads=kv_heads)

    def list_degrees(self, num_devices: int, head_parallel: int | str) -> list[int]:
        """List the head-parallel degrees to choose from: the given one, or all for ``"auto"``."""
        if not isinstance(head_parallel, str):
            return [head_parallel]
        return possible_head_parallel(num_devices, self.shape.num_heads, self.shape.kv_heads)

    def num_chunks(
        self,
        num_devices: int,
        head_parallel: int,
        most: int | None = None,
        *,
        is_backward: bool,
        kind: Kind | str = "quorums",
        rule: ChunkRule = FETCHED,
        machine: Machine | None = None,
    ) -> int:
        """Return the number of head chunks of a device: a divisor of its number of KV heads.

        With S chunks, 1/S of the communication is exposed, but each chunk adds launch overhead and
        a kernel tail. With more than four, kernels become too short. If devices wait for their
        links most of the time, there are four.

        Args:
            num_devices: Number of devices. One device has no communication to overlap.
            head_parallel: Head-parallel degree.
            most: Maximum number of chunks; ``None`` chooses 1, 2 or 4 by the work.
            is_backward: Whether a backward pass is included, with the same number of chunks.
            kind: Kind of the plan of ``num_devices / head_parallel`` tasks.
            rule: Thresholds of the transport.
            machine: Throughput and links of the devices; ``None`` means fast links.

        Example:
            >>> shape = AttentionShape(32, 128, num_kv_heads=4)
            >>> [
            ...     Workload(tokens, shape).num_chunks(8, 1, is_backward=is_backward)
            ...     for tokens in (2**14, 2**15, 2**18)
            ...     for is_backward in (False, True)
            ... ]
            [1, 1, 2, 4, 4, 2]
        """
        num_tasks = num_devices // head_parallel
        kv_heads = self.part(head_parallel).kv_heads
        if most is None and machine is not None and self._wait_for_links(num_devices, machine):
            most = 4
        if most is None:
            most = 1
            flops = self.flops(is_backward=False) / self.shape.batch / num_devices
            if num_devices > 1 and flops >= rule.two:
                num_keys = self._keys * fit_kind(kind, num_tasks).num_groups[1] // num_tasks
                four = rule.four_of_both if is_backward else rule.four
                are_long = is_backward and num_keys > rule.most_keys
                most = 4 if flops >= four and not are_long else 2
                if is_backward and self.is_causal:
                    num_tiles = kv_heads * num_keys // _KEYS_OF_TILE
                    most = min(most, num_tiles // _LEAST_TILES)
        return max(n for n in range(1, min(max(most, 1), kv_heads) + 1) if kv_heads % n == 0)

    def _wait_for_links(self, num_devices: int, machine: Machine) -> bool:
        """Return whether a device takes longer to send its shard than to compute, and long."""
        seconds = machine.hop(1, num_devices) - machine.latency
        seconds *= sum(self.shard_bytes(num_devices))
        compute = self.seconds(machine, is_backward=False) / num_devices
        return num_devices > 1 and seconds > max(compute, _LATENCIES_OF_SHARD * machine.latency)

    @property
    def _keys(self) -> int:
        return self.tokens if self.num_keys is None else self.num_keys
