"""Devices and links that plans are predicted for."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True)
class Machine:
    """Throughput of the devices, and bandwidth and latency of their links."""

    rate: float = 600e12
    """Throughput of a forward kernel in FLOP/s; the default is an H200 with the Triton backend."""
    backward_rate: float = 420e12
    """Throughput of a backward kernel in FLOP/s."""
    per_row: float = 0.7e-9
    """Seconds of a forward kernel for each query row and head, besides its matrix products. A row
    that several kernels process is counted several times."""
    bandwidth: float = 300e9
    """Bandwidth of a device within its node, bytes per second and direction."""
    latency: float = 20e-6
    """Latency of a collective, or of a hop of the ring, in seconds."""
    devices_per_node: float = math.inf
    """Number of devices in a node."""
    between: float = math.inf
    """Bandwidth of a device between nodes, bytes per second and direction."""
    host: float = 45e9
    """Bandwidth between a device and the memory of its host, bytes per second and direction; the
    default is pinned memory over PCIe."""
    tiles: float = 132
    """Number of tiles that a device computes at a time: the SMs of a GPU, 1 for a CPU."""

    def __post_init__(self) -> None:
        """Raise ValueError unless all numbers are positive; times are finite, and may be 0."""
        for field in fields(self):
            number, is_time = getattr(self, field.name), field.name in ("latency", "per_row")
            if not (0 <= number < math.inf if is_time else number > 0):
                wanted = "at least 0 and finite" if is_time else "positive"
                raise ValueError(f"{field.name} must be {wanted}, got {number:g}")

    def exchange(self, inside: float, outside: float = 0) -> float:
        """Return the seconds of an exchange.

        Args:
            inside: Bytes that a device sends within its node, and as many that it receives.
            outside: Bytes that a device sends to other nodes, and as many that it receives.
        """
        if not (inside or outside):
            return 0.0
        return self.latency + max(inside / self.bandwidth, outside / self.between)


MACHINES = {
    "H200": Machine(backward_rate=520e12, bandwidth=160e9, latency=160e-6, between=50e9),
    "H100": Machine(backward_rate=520e12, bandwidth=160e9, latency=160e-6, between=50e9),
    "B200": Machine(900e12, 630e12, 0.5e-9, bandwidth=320e9, latency=160e-6, between=50e9),
    "A100": Machine(200e12, 140e12, 2.1e-9, bandwidth=107e9, latency=160e-6, between=25e9),
    "CPU": Machine(0.2e12, 0.14e12, 1e-7, 2e9, 1e-3, between=125e6, host=5e9, tiles=1),
}
"""Machines by a part of the device's name. Bandwidth and latency of H200 are fitted to 4 GPUs of
one host; the others are scaled by data sheets and not measured, as are all links between hosts:
400 Gb/s InfiniBand per GPU, 200 Gb/s for A100, and Gigabit Ethernet for CPUs."""


class ChunkRule(NamedTuple):
    """Thresholds of the number of head chunks, in FLOPs of a rank's forward pass."""

    two: float
    """FLOPs from which two chunks pay; with fewer, the host takes longer to launch them."""
    four: float
    """FLOPs from which four chunks pay in a forward pass without gradients."""
    four_of_both: float
    """FLOPs of the forward pass from which four chunks pay if a backward pass follows."""
    most_keys: float
    """Keys of a rank up to which four chunks pay if a backward pass follows. With more, the tail of
    each kernel is longer, because the time of a tile grows with the number of keys."""


FETCHED = ChunkRule(1e12, 8e12, 2e12, 65_536)
"""Thresholds for P2P copies between GPUs.

With two chunks instead of one the host takes 1.2 ms more forward and 2.5 ms for both passes. In a
loop of calls, 16K causal tokens on two H100s (5.5e11) take 1.9 ms in one chunk and 3.0 in two, and
4.3 and 6.3 ms for both passes. If the GPUs are busy when a call is launched, a forward pass takes
1.24 and 1.10 ms (benchmarks/journal/ranks.md)."""
SENT = ChunkRule(2e12, 8e12, 8e12, math.inf)
"""Thresholds for messages of torch.distributed."""
