"""Predict time, traffic and memory of context-parallel methods on many devices."""

import argparse
import math
from dataclasses import replace
from itertools import groupby
from typing import Any

from cqs.arguments import as_integer
from cqs.commands.options import add_causal, add_heads, note_idle, parse_integer, parse_integers
from cqs.report.table import Table, digits, percent, show
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import Prediction, predict
from cqs.scheduler.interest_sets import MAX_NUM_TASKS
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import Workload

_PADDED = "ulysses padded"
_METHODS = ("cqs quorums", "cqs", "ring", "all-gather", "ulysses", _PADDED, "2-D")
_LINKS = {"nvlink": 300e9, "pcie": 25e9, "ib": 50e9}
"""Bytes per second of a device and direction: NVLink 4 and PCIe 4.0 x16 as NCCL uses them, and
400 Gb/s InfiniBand."""


def _link(text: str) -> float:
    """Return the bytes per second of a link's name, or of a number of GB/s."""
    try:
        return _LINKS[text] if text in _LINKS else 1e9 * float(text)
    except ValueError:
        names = ", ".join(_LINKS)
        error = f"must be {names} or a number of GB/s, got {text!r}"
        raise argparse.ArgumentTypeError(error) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs simulate``."""
    add = parser.add_argument
    add(
        "--devices", type=parse_integers, default=[8, 64, 512, 4096], metavar="W,W,...",
        help="default: 8,64,512,4096",
    )  # fmt: skip
    add("--seqlen", type=parse_integer, default=2**20, metavar="N", help="default: 1M")
    add_heads(parser, 32, 128)
    add_causal(parser, default=True)
    add(
        "--backward", dest="passes", action="store_const", const="both", default="forward",
        help="forward and backward together",
    )  # fmt: skip
    add(
        "--slack", type=float, default=0.0, metavar="PERCENT",
        help="choose as head_parallel=\"auto\" among degrees this much slower than the fastest",
    )  # fmt: skip
    add = parser.add_argument_group("machine").add_argument
    add(
        "--link", dest="bandwidth", type=_link, metavar="LINK",
        help="nvlink, pcie, ib or a number of GB/s per device and direction; default: nvlink",
    )  # fmt: skip
    add("--latency", type=float, metavar="MICROSECONDS", help="of a collective or hop; default: 20")
    add("--rate", type=float, metavar="TFLOPS", help="default: 600 forward, 0.7 of it backward")
    add(
        "--devices-per-node",
        type=int,
        metavar="D",
        help="--link then applies within a node; default: all",
    )
    add("--between", type=_link, metavar="LINK", help="link of nodes; default: ib")


def run(options: argparse.Namespace) -> None:
    """Print the predictions."""
    check_options(options)
    show_predictions(options, read_machine(options, Machine()))


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for an invalid option."""
    if not options.slack >= 0:  # also NaN
        raise ValueError(f"--slack must be at least 0, got {options.slack:g}")
    for number in options.devices:
        as_integer("--devices", number, 1, MAX_NUM_TASKS)


def read_case(options: argparse.Namespace) -> Workload:
    """Return the workload of the options."""
    shape = AttentionShape(options.num_heads, options.head_dim, num_kv_heads=options.num_kv_heads)
    return Workload(as_integer("--seqlen", options.seqlen, 1), shape, options.is_causal)


def show_predictions(
    options: argparse.Namespace, machine: Machine
) -> dict[int, dict[str, Prediction]]:
    """Print problem and predictions; return these by number of devices, then by method."""
    case, passes = read_case(options), options.passes
    note_idle(max(options.devices), case.tokens, "devices")
    predictions = {
        num_devices: {
            method: cost
            for method in _METHODS
            if (cost := _predict(method, case, num_devices, machine, passes, options.slack / 100))
        }
        for num_devices in options.devices
    }
    one_device_seconds = case.one_device_seconds(machine, passes)
    rows = [
        [
            num_devices if method == next(iter(methods)) else "",
            method,
            f"{cost.head_parallel} x {num_devices // cost.head_parallel}",
            _duration(cost.seconds),
            percent(one_device_seconds / num_devices / cost.seconds),
            digits(cost.bytes_received / 2**30),
            digits(cost.peak_bytes / 2**30),
            "<" if method == fastest_of(methods) else "",
        ]
        for num_devices, methods in predictions.items()
        for method, cost in methods.items()
    ]
    print(describe_problem(case, machine, passes))
    header = ["devices", "method", "split", "time", "efficiency", "GiB received", "peak GiB", ""]
    show(Table(header, rows))
    print(f"Least time, within 1 %: {describe_fastest(predictions)} devices.")
    return predictions


def _predict(method: str, case: Workload, num_devices: int, *options: Any) -> Prediction | None:
    """Predict a method; Ulysses with padded heads where the devices do not divide these."""
    if method == _PADDED:
        shape = case.shape
        if num_devices > shape.kv_heads or shape.kv_heads % num_devices == 0:
            return None
        kv_heads = -(-shape.kv_heads // num_devices) * num_devices
        heads = shape.num_heads // shape.kv_heads * kv_heads
        shape = replace(shape, num_heads=heads, num_kv_heads=kv_heads)
        method, case = "ulysses", replace(case, shape=shape)
    return predict(method, case, num_devices, *options)


def describe_problem(case: Workload, machine: Machine, passes: str) -> str:
    """Describe the problem and the machine of predictions in three lines."""
    shape, gigabytes = case.shape, 1e-9 * machine.bandwidth
    nodes = f" in nodes of {machine.devices_per_node:g}, {1e-9 * machine.between:g} GB/s between"
    return (
        f"Problem: {case.tokens:,} tokens, {'causal' if case.is_causal else 'non-causal'}, "
        f"{shape.num_heads} query heads and {shape.kv_heads} KV heads of {shape.head_dim}, "
        f"{shape.itemsize} bytes per element\n"
        f"Devices: {1e-12 * machine.rate:g} TFLOP/s forward, {1e-12 * machine.backward_rate:g} "
        f"backward, {gigabytes:g} GB/s{nodes * math.isfinite(machine.devices_per_node)}, "
        f"latency {1e6 * machine.latency:g} us\n"
        f"Predicted, per device, {'forward and backward' if passes == 'both' else passes}:"
    )


def _duration(seconds: float) -> str:
    """Return a time as text, in milliseconds, seconds or hours."""
    if seconds < 1:
        return f"{digits(1e3 * seconds)} ms"
    return f"{digits(seconds)} s" if seconds < 3600 else f"{digits(seconds / 3600)} h"


def fastest_of(methods: dict[str, Prediction]) -> str:
    """Return the method with the least predicted time, the first of equals."""
    return min(methods, key=lambda method: methods[method].seconds)


def describe_fastest(predictions: dict[int, dict[str, Prediction]]) -> str:
    """Describe which methods are fastest on which numbers of devices.

    Methods within 1 % of the least time count as equal, because the cost model is not more
    accurate.
    """

    def fastest(num_devices: int) -> str:
        methods = predictions[num_devices]
        least = methods[fastest_of(methods)].seconds
        names = [name for name, cost in methods.items() if cost.seconds <= 1.01 * least]
        return "any method" if len(names) == len(methods) else " or ".join(names)

    parts = []
    for names, group in groupby(sorted(predictions), key=fastest):
        numbers = list(group)
        parts.append(f"{names} on {numbers[0]}" + f" to {numbers[-1]}" * (len(numbers) > 1))
    return "; ".join(parts)


def read_machine(options: argparse.Namespace, machine: Machine) -> Machine:
    """Return a machine with the values that the options replace.

    Args:
        options: The parsed options.
        machine: Values for options that are not given.
    """
    given = {
        name: getattr(options, name)
        for name in ("bandwidth", "devices_per_node", "between")
        if getattr(options, name) is not None
    }
    if options.latency is not None:
        given["latency"] = 1e-6 * options.latency
    if options.rate is not None:
        given |= {"rate": 1e12 * options.rate, "backward_rate": 0.7e12 * options.rate}
    if "between" in given and "devices_per_node" not in given:
        raise ValueError("--devices-per-node must be given with --between, got none")
    if "devices_per_node" in given:
        given.setdefault("between", _LINKS["ib"])
    return replace(machine, **given)
