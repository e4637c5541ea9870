"""Predict time, traffic and memory of context-parallel methods on many devices."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

from cqs.arguments import as_integer
from cqs.commands.integers import parse_integer, parse_integers
from cqs.report.table import format_table, mebibytes, percent
from cqs.scheduler import AttentionShape
from cqs.scheduler.cost_model import Machine, Prediction, Workload, predict
from cqs.scheduler.interest_sets import MAX_NUM_TASKS

_METHODS = ("cqs quorums", "cqs", "ring", "all-gather", "ulysses", "2-D")
_LINKS = {"nvlink": 300.0, "ib": 50.0}
"""GB/s per device and direction: NVLink 4 as NCCL uses it (of 450), and 400 Gb/s InfiniBand."""


def _link(text: str) -> float:
    try:
        return _LINKS[text] if text in _LINKS else float(text)
    except ValueError:
        names = ", ".join(_LINKS)
        raise argparse.ArgumentTypeError(
            f"must be {names} or a number of GB/s, got {text!r}"
        ) from None


_MACHINE: dict[str, tuple[str, Callable[[str], float], float, str, str]] = {
    "bandwidth": (
        "--link", _link, 1e9, "LINK",
        "nvlink, ib or a number of GB/s per device and direction; default: nvlink",
    ),
    "latency": ("--latency", float, 1e-6, "MICROSECONDS", "of a collective or hop; default: 20"),
    "rate": ("--rate", float, 1e12, "TFLOPS", "forward; default: 600"),
    "backward_rate": ("--backward-rate", float, 1e12, "TFLOPS", "default: 0.7 of the other"),
    "per_row": (
        "--per-row", float, 1e-9, "NANOSECONDS",
        "of a forward kernel for each query row and head, besides its matrix products; "
        "default: 0.7",
    ),
    "devices_per_node": (
        "--devices-per-node", int, 1, "D", "--link then applies within a node"
    ),
    "between": ("--between", _link, 1e9, "LINK", "link of nodes; default: ib"),
}  # fmt: skip
"""Attributes of a machine: option, type, value of one unit, unit and help text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs simulate``."""
    parser.add_argument(
        "--devices", type=parse_integers, default=[8, 64, 512, 4096], metavar="W,W,...",
        help="default: 8,64,512,4096",
    )  # fmt: skip
    parser.add_argument(
        "--seqlen", type=parse_integer, default=2**20, metavar="N", help="default: 1M"
    )
    parser.add_argument("--heads", type=int, default=32, metavar="H")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="default: as many")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--causal", choices=("yes", "no"), default="yes")
    parser.add_argument(
        "--backward", dest="passes", action="store_const", const="both", default="forward",
        help="forward and backward together",
    )  # fmt: skip
    parser.add_argument(
        "--slack", type=float, default=0.0, metavar="PERCENT",
        help="among the degrees so much slower than the fastest, choose as head_parallel=\"auto\"",
    )  # fmt: skip
    machine = parser.add_argument_group("machine")
    for name, (option, kind, _, metavar, text) in _MACHINE.items():
        machine.add_argument(option, dest=name, type=kind, metavar=metavar, help=text)


def run(options: argparse.Namespace) -> None:
    """Print the predictions."""
    check_options(options)
    show_predictions(options, read_machine(options, Machine()))


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError for an invalid option."""
    if options.slack < 0:
        raise ValueError(f"--slack must be at least 0, got {options.slack:g}")
    for number in options.devices:
        as_integer("--devices", number, 1, MAX_NUM_TASKS)


def read_case(options: argparse.Namespace) -> Workload:
    """Return the workload of the options."""
    shape = AttentionShape(options.heads, options.head_dim, num_kv_heads=options.kv_heads)
    return Workload(as_integer("--seqlen", options.seqlen, 1), shape, options.causal == "yes")


def show_predictions(
    options: argparse.Namespace, machine: Machine
) -> dict[int, dict[str, Prediction]]:
    """Print a table of the predictions; return them by number of devices, then by method."""
    case, passes = read_case(options), options.passes
    found = {
        num_devices: {
            method: each
            for method in _METHODS
            if (each := predict(method, case, num_devices, machine, passes, options.slack / 100))
        }
        for num_devices in options.devices
    }
    print(prediction_table(found, case.one_device_seconds(machine, passes)))
    print(f"Least time, within 1 %: {describe_fastest(found)} devices.")
    return found


def prediction_table(found: dict[int, dict[str, Prediction]], one_device_seconds: float) -> str:
    """Return the text table of predictions.

    Args:
        found: Predictions by number of devices, then by method.
        one_device_seconds: Predicted time of one device in seconds, for the efficiency.
    """
    rows = []
    for num_devices, methods in found.items():
        best = fastest_of(methods)
        for i, (method, each) in enumerate(methods.items()):
            rows.append(
                [
                    "" if i else num_devices,
                    method,
                    f"{each.head_parallel} x {num_devices // each.head_parallel}",
                    f"{1e3 * each.seconds:.4g}",
                    percent(one_device_seconds / num_devices / each.seconds),
                    mebibytes(each.bytes_received),
                    mebibytes(each.peak_bytes),
                    "<" if method == best else "",
                ]
            )
    header = ["devices", "method", "split", "ms", "efficiency", "MiB in, out", "peak MiB", ""]
    return format_table(header, rows)


def fastest_of(methods: dict[str, Prediction]) -> str:
    """Return the method with the least predicted time, the first of equals."""
    return min(methods, key=lambda method: methods[method].seconds)


def describe_fastest(found: dict[int, dict[str, Prediction]]) -> str:
    """Describe which methods are fastest on which numbers of devices.

    Methods within 1 % of the least time count as equal, because the cost model is not more
    accurate.
    """

    def fastest(num_devices: int) -> str:
        methods = found[num_devices]
        least = methods[fastest_of(methods)].seconds
        names = [name for name, each in methods.items() if each.seconds <= 1.01 * least]
        return "any method" if len(names) == len(methods) else " or ".join(names)

    parts = []
    for names, group in groupby(sorted(found), key=fastest):
        numbers = list(group)
        span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        parts.append(f"{names} on {span}")
    return "; ".join(parts)


def read_machine(options: argparse.Namespace, machine: Machine) -> Machine:
    """Return a machine with the values that the options replace.

    Args:
        options: The parsed options.
        machine: Values for options that are not given.
    """
    given = {
        name: getattr(options, name) * unit
        for name, (_, _, unit, _, _) in _MACHINE.items()
        if getattr(options, name) is not None
    }
    if options.rate and options.backward_rate is None:
        given["backward_rate"] = 0.7 * given["rate"]
    if options.between is not None and options.devices_per_node is None:
        raise ValueError("--devices-per-node must be given with --between, got none")
    if options.devices_per_node is not None and options.between is None:
        given["between"] = 1e9 * _LINKS["ib"]
    return replace(machine, **given)
