"""Hosts on this machine, with links of a given rate: network namespaces that a bridge connects."""

import argparse
import ctypes
import math
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from cqs.arguments import as_integer

INTERFACE = "eth0"
"""Name of the network interface of every host."""
_MTU = 9000
"""Bytes of a packet at most. Headers are 0.7 % of it."""
_BURST_BYTES = 2 * (_MTU + 14)
"""Bytes that a link sends at once."""
_QUEUE_BYTES = 64 * 2**20
"""Bytes that wait for a link; more are dropped."""
_TIMEOUT = "5s"
"""Least time after which TCP sends a packet again. Queues hold packets for seconds, and nothing is
lost."""
_PORT = 29500
"""Port of the rendezvous, on the first host."""
_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
"""TCP's congestion control of this process's host. Reno is the one that every namespace may use."""
_NAMESPACES = Path("/run/netns")
_PREFIX = "cqs"
_NEW_NAMES, _NEW_NETWORK = 0x04000000, 0x40000000  # CLONE_NEWUTS and CLONE_NEWNET of sched.h


def why_not_hosts() -> str | None:
    """Return why this machine cannot make hosts, or ``None`` if it can."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    for program in ("ip", "tc"):
        if not any((Path(each) / program).exists() for each in os.get_exec_path()):
            return f"it takes the program {program} of iproute2"
    try:
        _run(f"ip netns add {_PREFIX}-{os.getpid()}-try")
        _run(f"ip netns delete {_PREFIX}-{os.getpid()}-try")
    except OSError as error:
        return str(error)
    return None


class Hosts:
    """Hosts in network namespaces, each with one link to a bridge, as a context manager.

    Consecutive ranks share a host. Processes of a host have its own host name and interfaces, but
    share the file system, the memory and the processors of this machine.
    """

    def __init__(self, rates: Sequence[float], ranks_per_host: int = 1, *, is_fair: bool = True):
        """Describe hosts; entering the context makes them.

        Args:
            rates: For every host the rate of its link, in megabits per second and direction.
            ranks_per_host: Number of ranks of every host.
            is_fair: Whether both ends of a link share its rate fairly among the other hosts, as the
                queues (``fq_codel``) that Linux distributions use by default do. If not, an end is
                one first-in-first-out queue, as in a plain switch.

        Raises:
            ValueError: There are no hosts, or a rate is not positive and finite.
        """
        if not rates or not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"rates must be positive and finite, one or more, got {list(rates)}")
        self.rates = list(rates)
        self.ranks_per_host = as_integer("ranks_per_host", ranks_per_host, 1)
        self.num_ranks = len(rates) * ranks_per_host
        self.is_fair = is_fair
        self._owner = os.getpid()
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> "Hosts":
        _remove_stale()
        bridge = self._name("bridge")
        try:
            _run(f"ip netns add {bridge}")
            _ip(bridge, ["link add switch type bridge", f"link set switch mtu {_MTU} up"])
            for host in range(len(self.rates)):
                self._connect(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for name in ("bridge", *range(len(self.rates))):
            if (_NAMESPACES / self._name(name)).exists():
                _run(f"ip netns delete {self._name(name)}")

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        return f"10.77.{host // 200}.{host % 200 + 1}"

    def set_rate(self, host: int, rate: float) -> None:
        """Limit the link of a host to a rate in megabits per second, in both directions."""
        if not self.is_fair:
            queue = f"rate {round(1e6 * rate)} burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
            for place, interface, _ in self._ends(host):
                _tc(place, [f"qdisc replace dev {interface} root tbf {queue}"])
            return
        others, limit = max(len(self.rates) - 1, 1), f"ceil {round(1e6 * rate)}"
        limit += f" burst {_BURST_BYTES} cburst {_BURST_BYTES} quantum {_MTU + 14}"
        for place, interface, _ in self._ends(host):
            whole = f"class replace dev {interface} parent 1: classid 1:1 htb"
            share = f"class replace dev {interface} parent 1:1 classid 1:{{:x}} htb"
            _tc(
                place,
                [f"{whole} rate {round(1e6 * rate)} {limit}"]
                + [
                    f"{share.format(number)} rate {round(1e6 * rate / others)} {limit}"
                    for number, _ in self._classes(host)
                ],
            )

    def _connect(self, host: int) -> None:
        """Connect a host with the bridge."""
        place, bridge = self._name(host), self._name("bridge")
        _run(f"ip netns add {place}")
        _ip(
            place,
            [
                f"link add {INTERFACE} mtu {_MTU} type veth peer name port{host} mtu {_MTU}",
                f"link set port{host} netns {bridge}",
                f"address add {self.address(host)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} gso_max_segs 1 gso_max_size {_MTU} up",
                f"route replace 10.77.0.0/16 dev {INTERFACE} rto_min {_TIMEOUT}",
                "link set lo up",
            ],
        )
        _ip(bridge, [f"link set port{host} master switch up"])
        ends = self._ends(host) if self.is_fair else []
        for place, interface, _ in ends:
            _tc(place, [f"qdisc add dev {interface} root handle 1: htb"])
        self.set_rate(host, self.rates[host])
        for place, interface, side in ends:
            for number, address in self._classes(host):
                _tc(
                    place,
                    [
                        f"qdisc add dev {interface} parent 1:{number:x} bfifo limit {_QUEUE_BYTES}",
                        f"filter add dev {interface} parent 1: protocol ip u32 "
                        f"match ip {side} {address}/32 flowid 1:{number:x}",
                    ],
                )

    def _ends(self, host: int) -> list[tuple[str, str, str]]:
        """Return namespace and interface of both ends of a link, and whose address matters."""
        bridge = self._name("bridge")
        return [(self._name(host), INTERFACE, "dst"), (bridge, f"port{host}", "src")]

    def _classes(self, host: int) -> list[tuple[int, str]]:
        """Return the number of a class of a link for every other host, and the host's address."""
        return [
            (other + 2, self.address(other)) for other in range(len(self.rates)) if other != host
        ]

    def unplug(self, host: int) -> None:
        """Take the link of a host down."""
        _ip(self._name("bridge"), [f"link set port{host} down"])

    def plug(self, host: int) -> None:
        """Take the link of a host up again."""
        _ip(self._name("bridge"), [f"link set port{host} up"])

    def part(self, hosts: Iterable[int]) -> None:
        """Move hosts to another bridge, so that they reach only each other."""
        commands = ["link add other type bridge", f"link set other mtu {_MTU} up"]
        _ip(
            self._name("bridge"), commands + [f"link set port{host} master other" for host in hosts]
        )

    def start(self, program: Callable[..., object], *arguments: Any) -> list[BaseProcess]:
        """Start a function in a process for every rank, with the environment of torchrun.

        The processes are copies of this one, which must not have used several threads of PyTorch.

        Args:
            program: Called with ``arguments``.
            *arguments: Arguments of the function.

        Returns:
            The processes, which are killed at the end of the context.
        """
        context = multiprocessing.get_context("fork")
        started: list[BaseProcess] = [
            context.Process(target=self._run_as_rank, args=(rank, program, arguments))
            for rank in range(self.num_ranks)
        ]
        self._processes += started
        for process in started:
            process.start()
        return started

    def run(self, program: Callable[..., object], *arguments: Any) -> None:
        """Run a function in a process for every rank.

        Raises:
            RuntimeError: A process failed; the others are killed.
        """
        waiting = dict(enumerate(self.start(program, *arguments)))
        while waiting:
            multiprocessing.connection.wait([each.sentinel for each in waiting.values()])
            for rank, process in [*waiting.items()]:
                if process.exitcode is None:
                    continue
                del waiting[rank]
                if process.exitcode:
                    for other in waiting.values():
                        other.kill()
                    raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode}")

    def _name(self, host: int | str) -> str:
        return f"{_PREFIX}-{self._owner}-{host}"

    def _run_as_rank(
        self, rank: int, program: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        host, local_rank = divmod(rank, self.ranks_per_host)
        _move_to(self._name(host))
        socket.sethostname(f"host{host}")
        _CONGESTION_CONTROL.write_text("reno")
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(local_rank),
            WORLD_SIZE=str(self.num_ranks),
            LOCAL_WORLD_SIZE=str(self.ranks_per_host),
            MASTER_ADDR=self.address(0),
            MASTER_PORT=str(_PORT),
            GLOO_SOCKET_IFNAME=INTERFACE,
            TP_SOCKET_IFNAME=INTERFACE,
        )
        torch.set_num_threads(1)
        try:
            program(*arguments)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # threads of a process group may wait for ranks that are gone


def link_bytes(interface: str) -> int:
    """Return the bytes that a network interface of this process's host has sent, with headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise ValueError(f"there is no interface named {interface}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--hosts", type=int, default=4, metavar="H", help="default: 4")
    parser.add_argument(
        "--mbit", default="100", metavar="R,R,...", help="of one or all links; default: 100"
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "module", metavar="MODULE", help="a module that is run on every rank, as python -m does"
    )
    parser.add_argument("words", nargs=argparse.REMAINDER, help="its arguments")


def run(*, hosts: int, mbit: str, ranks_per_host: int, module: str, words: list[str]) -> None:
    """Run a module on every rank of some hosts, with the environment of torchrun.

    Args:
        hosts: Number of hosts.
        mbit: Megabits per second of every link, or those of each link, separated by commas.
        ranks_per_host: Number of ranks of every host.
        module: Name of the module.
        words: Its command line.

    Raises:
        ValueError: This machine cannot make hosts, or there is no such number of rates.
        RuntimeError: A rank failed.
    """
    if reason := why_not_hosts():
        raise ValueError(f"hosts cannot be made: {reason}")
    rates = [float(each) for each in mbit.split(",")]
    if len(rates) not in (1, hosts):
        raise ValueError(f"--mbit must have 1 or {hosts} rates, got {len(rates)}")

    def program() -> None:
        sys.argv = [module, *words]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            if ended.code:
                raise

    with Hosts(rates * (hosts // len(rates)), ranks_per_host) as network:
        network.run(program)


def _run(command: str, written: str | None = None) -> None:
    found = subprocess.run(command.split(), input=written, capture_output=True, text=True)
    if found.returncode:
        raise OSError(f"{command}: {found.stderr.strip()}")


def _ip(namespace: str, commands: Sequence[str]) -> None:
    """Run commands of ``ip`` in a namespace."""
    _run(f"ip -netns {namespace} -batch -", "\n".join(commands))


def _tc(namespace: str, commands: Sequence[str]) -> None:
    """Run commands of ``tc`` in a namespace."""
    _run(f"tc -netns {namespace} -batch -", "\n".join(commands))


def _remove_stale() -> None:
    """Remove the namespaces of processes that were killed."""
    for path in _NAMESPACES.glob(f"{_PREFIX}-*-*"):
        if not Path("/proc", path.name.split("-")[1]).exists():
            _run(f"ip netns delete {path.name}")


def _move_to(namespace: str) -> None:
    """Move this process to a network namespace, with a host name of its own."""
    system = ctypes.CDLL(None, use_errno=True)
    with (_NAMESPACES / namespace).open() as file:
        if system.setns(file.fileno(), _NEW_NETWORK) or system.unshare(_NEW_NAMES):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
