"""Predict time, traffic and memory of ways to spread one attention over many devices."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from cqs.commands.table import format_table, mebibytes, percent
from cqs.scheduler import AttentionShape
from cqs.simulation import Case, Forecast, Machine, fit, forecast, read_rows

_METHODS = ("cqs quorums", "cqs", "ring", "all-gather", "ulysses", "2-D")
_LINKS = {"nvlink": 300.0, "ib": 50.0}
"""GB/s per device and direction: what NCCL gets of NVLink 4's 450, and 400 Gb/s InfiniBand."""
_SUFFIXES = {"K": 2**10, "M": 2**20, "G": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs simulate``."""
    parser.add_argument(
        "--devices", type=_lengths, default=[8, 64, 512, 4096], metavar="W,W,...",
        help="default: 8,64,512,4096",
    )  # fmt: skip
    parser.add_argument("--tokens", type=_length, default=2**20, metavar="N", help="default: 1M")
    parser.add_argument("--heads", type=int, default=32, metavar="H")
    parser.add_argument("--kv-heads", type=int, metavar="H", help="default: as many")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--causal", choices=("yes", "no"), default="yes")
    parser.add_argument("--backward", action="store_true", help="forward and backward together")
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--link", type=_link, metavar="LINK",
        help="nvlink, ib or GB/s per device and direction; default: nvlink",
    )  # fmt: skip
    machine.add_argument(
        "--latency", type=float, metavar="MICROSECONDS", help="of a collective or hop; default: 20"
    )
    machine.add_argument("--rate", type=float, metavar="TFLOPS", help="forward; default: 600")
    machine.add_argument(
        "--backward-rate", type=float, metavar="TFLOPS", help="default: 0.7 of the other"
    )
    machine.add_argument(
        "--devices-per-node", type=int, metavar="D", help="then --link is for within a node"
    )
    machine.add_argument("--between", type=_link, metavar="LINK", help="of nodes; default: ib")
    machine.add_argument(
        "--fit", metavar="FILE.jsonl", help="take what fits these rows of `cqs bench peers` best"
    )
    machine.add_argument(
        "--check", metavar="FILE.jsonl", help="compare such rows with what is predicted, no more"
    )


def run(options: argparse.Namespace) -> None:
    """Print what is predicted, or how well."""
    machine = _machine(options)
    if options.check:
        print(check_table(options.check, machine))
        return
    shape = AttentionShape(options.heads, options.head_dim, num_kv_heads=options.kv_heads)
    case = Case(options.tokens, shape, options.causal == "yes")
    passes = "both" if options.backward else "forward"
    found = {
        num_devices: {
            method: each
            for method in _METHODS
            if (each := forecast(method, case, num_devices, machine, passes))
        }
        for num_devices in options.devices
    }
    print(forecast_table(found, case.seconds_of_one(machine, passes)))
    print(f"Least time, within 1 %: {winners(found)} devices.")


def forecast_table(found: dict[int, dict[str, Forecast]], seconds_of_one: float) -> str:
    """Tabulate forecasts by number of devices and method."""
    rows = []
    for num_devices, methods in found.items():
        best = best_of(methods)
        for i, (method, each) in enumerate(methods.items()):
            rows.append(
                [
                    "" if i else num_devices,
                    method,
                    f"{each.num_slices} x {num_devices // each.num_slices}",
                    f"{1e3 * each.seconds:.4g}",
                    percent(seconds_of_one / num_devices / each.seconds),
                    mebibytes(each.bytes_each_way),
                    mebibytes(each.peak_bytes),
                    "<" if method == best else "",
                ]
            )
    header = ["devices", "method", "split", "ms", "efficiency", "MiB in, out", "peak MiB", ""]
    return format_table(header, rows)


def best_of(methods: dict[str, Forecast]) -> str:
    """Return the method that takes the least time, of equals the first."""
    return min(methods, key=lambda method: methods[method].seconds)


def winners(found: dict[int, dict[str, Forecast]]) -> str:
    """Say from where to where, in numbers of devices, which methods take the least time.

    Those within 1 % of it count as equal: the model is no better than that.
    """

    def fastest(num_devices: int) -> str:
        methods = found[num_devices]
        least = methods[best_of(methods)].seconds
        names = [name for name, each in methods.items() if each.seconds <= 1.01 * least]
        return "any method" if len(names) == len(methods) else " or ".join(names)

    parts = []
    for names, group in groupby(sorted(found), key=fastest):
        numbers = list(group)
        span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
        parts.append(f"{names} on {span}")
    return "; ".join(parts)


def check_table(path: str, machine: Machine) -> str:
    """Tabulate measured rows beside what is predicted, and say where that strays most."""
    rows = read_rows(path)
    ratios = [row.ratio(machine) for row in rows]
    cells = [
        [
            "causal" if row.case.is_causal else "full",
            row.case.tokens,
            row.passes,
            "one" if row.num_devices == 1 else row.method,
            row.num_devices,
            f"{1e3 * row.seconds:.3f}",
            f"{1e3 * row.seconds * ratio:.3f}",
            f"{ratio:.3f}",
        ]
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    header = ["case", "tokens", "pass", "by", "devices", "measured ms", "predicted ms", "ratio"]
    worst = max(ratios, key=lambda ratio: max(ratio, 1 / ratio))
    return (
        f"{format_table(header, cells)}\nThe largest deviation: {worst:.3f} of what was measured."
    )


def _machine(options: argparse.Namespace) -> Machine:
    """Return what the options describe; those that are given win over a fit."""
    machine = Machine()
    if options.fit:
        machine = fit(read_rows(options.fit))
        print(
            f"Fitted: {machine.rate / 1e12:.0f} TFLOP/s forward, "
            f"{machine.backward_rate / 1e12:.0f} backward, "
            f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.latency * 1e6:.0f} microseconds"
        )
    given = {
        "rate": _scaled(options.rate, 1e12),
        "backward_rate": _scaled(options.backward_rate, 1e12),
        "bandwidth": _scaled(options.link, 1e9),
        "latency": _scaled(options.latency, 1e-6),
        "devices_per_node": options.devices_per_node,
        "between": _scaled(options.between, 1e9),
    }
    if options.rate and options.backward_rate is None:
        given["backward_rate"] = 0.7 * given["rate"]
    if options.between is not None and options.devices_per_node is None:
        raise ValueError("--between goes with --devices-per-node")
    if options.devices_per_node is not None and options.between is None:
        given["between"] = 1e9 * _LINKS["ib"]
    return replace(machine, **{name: each for name, each in given.items() if each is not None})


def _scaled(number: float | None, unit: float) -> float | None:
    return None if number is None else number * unit


def _link(text: str) -> float:
    try:
        return _LINKS[text] if text in _LINKS else float(text)
    except ValueError:
        names = ", ".join(_LINKS)
        raise argparse.ArgumentTypeError(f"must be {names} or GB/s, got {text!r}") from None


def _lengths(text: str) -> Sequence[int]:
    return [_length(part) for part in text.split(",")]


def _length(text: str) -> int:
    """Read an integer of at least 1: ``4096``, ``128K``, ``1M`` = 2^20, ``1e9``."""
    unit = _SUFFIXES.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        number = 0
    if not number >= 1 or number % 1:
        raise argparse.ArgumentTypeError(f"must be integers such as 8, 64K, 1M, got {text!r}")
    return int(number)
