"""Predict time, traffic and memory of ways to spread one attention over many devices."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from cqs.commands.integers import parse_integer, parse_integers
from cqs.commands.table import format_table, mebibytes, percent
from cqs.commands.written_files import check_written
from cqs.fitting import fit, read_rows
from cqs.scheduler import AttentionShape
from cqs.scheduler.arguments import as_integer
from cqs.scheduler.interest_sets import MAX_NUM_TASKS
from cqs.simulation import Case, Forecast, Machine, forecast

if TYPE_CHECKING:
    import numpy as np

    from cqs.event_simulation import Outcome, Trouble

_METHODS = ("cqs quorums", "cqs", "ring", "all-gather", "ulysses", "2-D")
_MAX_TRIALS = 100_000
_LINKS = {"nvlink": 300.0, "ib": 50.0}
"""GB/s per device and direction: what NCCL gets of NVLink 4's 450, and 400 Gb/s InfiniBand."""
_LIVES = {"llama3": 54 * 24 * 16_384 / 419, "opt": 61 * 24 * 992 / 105}
"""Hours of a device to an interruption: Llama 3 405B, 419 in 54 days on 16,384 (arXiv 2407.21783);
OPT-175B, 35 restarts by hand and some 70 others in two months on 992 (arXiv 2205.01068)."""


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
    parser.add_argument("--backward", action="store_true", help="forward and backward together")
    parser.add_argument(
        "--slack", type=float, default=0.0, metavar="PERCENT",
        help="of splits that take so much longer than the fastest, that of head_parallel=\"auto\"",
    )  # fmt: skip
    parser.add_argument(
        "--picture", metavar="FILE", help="draw all this against the number of devices"
    )
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
        "--per-row", type=float, metavar="NANOSECONDS",
        help="of a kernel, forward, for each row of queries and head beside its products; "
        "default: 0.7",
    )  # fmt: skip
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
    trouble = parser.add_argument_group("trouble", "play calls on devices that stray and die")
    trouble.add_argument(
        "--life", type=_lives, metavar="HOURS,...",
        help="mean time to the death of a device: hours, llama3 or opt; the rest goes with it",
    )  # fmt: skip
    trouble.add_argument(
        "--tasks", type=parse_integers, default=[1, 4, 16], metavar="K,...",
        help="tasks for each device; default: 1,4,16",
    )  # fmt: skip
    trouble.add_argument(
        "--saves", type=int, default=15, metavar="S",
        help="how often steps save partial results; default: 15",
    )  # fmt: skip
    trouble.add_argument(
        "--notice", type=float, default=10.0, metavar="SECONDS",
        help="until a task is handed out again; default: 10",
    )  # fmt: skip
    trouble.add_argument(
        "--repair", type=float, default=600.0, metavar="SECONDS",
        help="until a dead device is replaced; default: 600",
    )  # fmt: skip
    trouble.add_argument(
        "--slow", type=_slow, default=(0.0, 1.0), metavar="SHARE:FACTOR",
        help="of the devices, this share takes longer by this factor",
    )  # fmt: skip
    trouble.add_argument(
        "--spread", metavar="FILE.jsonl", help="let times stray as those of such rows"
    )
    trouble.add_argument("--trials", type=int, default=100, metavar="T", help="default: 100")
    trouble.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")


def run(options: argparse.Namespace) -> None:
    """Print what is predicted, or how well."""
    if options.picture:
        from cqs.plotting import check_picture

        check_picture(options.picture)
        check_written("--picture", options.picture, [options.fit, options.spread])
    machine = _machine(options)
    if options.check:
        print(check_table(options.check, machine))
        return
    if options.slack < 0:
        raise ValueError(f"--slack must be at least 0, got {options.slack:g}")
    for option in ("devices", "tasks"):
        for number in getattr(options, option):
            as_integer(f"--{option}", number, 1, MAX_NUM_TASKS)
    shape = AttentionShape(options.heads, options.head_dim, num_kv_heads=options.kv_heads)
    case = Case(as_integer("--seqlen", options.seqlen, 1), shape, options.causal == "yes")
    passes = "both" if options.backward else "forward"
    if options.life:
        _play(options, case, machine, passes)
        return
    found = {
        num_devices: {
            method: each
            for method in _METHODS
            if (each := forecast(method, case, num_devices, machine, passes, options.slack / 100))
        }
        for num_devices in options.devices
    }
    seconds_of_one = case.seconds_of_one(machine, passes)
    print(forecast_table(found, seconds_of_one))
    print(f"Least time, within 1 %: {winners(found)} devices.")
    if options.picture:
        from cqs.curves import draw_forecasts, save

        save(draw_forecasts(found, seconds_of_one), options.picture)


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


def ways_to_work(
    case: Case,
    num_devices: int,
    machine: Machine,
    passes: str,
    tasks: Sequence[int],
    num_saves: int,
) -> dict[str, Callable[["Trouble", "np.random.Generator"], "Outcome"]]:
    """Name ways to spread attention, and how each is played.

    Steps are those of the ring. Tasks are those of quorums on as many devices as there are tasks:
    the more there are for each device the more they move, of which nothing is hidden behind the
    task before.
    """
    from cqs.event_simulation import play_steps, play_tasks

    def seconds(method: str, num_devices: int) -> float:
        found = forecast(method, case, num_devices, machine, passes)
        assert found is not None, "neither cuts heads"
        return found.seconds

    steps = partial(
        play_steps, seconds("ring", num_devices) / num_devices, num_devices, num_devices
    )
    ways: dict[str, Callable[..., Outcome]] = {"steps": steps}
    if num_saves:
        ways[f"steps, {num_saves} saves"] = partial(steps, num_saves=num_saves)
    for each in tasks:
        num_tasks = each * num_devices
        task_seconds = seconds("cqs quorums", num_tasks)
        ways[f"tasks, {each} a device"] = partial(play_tasks, task_seconds, num_tasks, num_devices)
    return ways


def _play(options: argparse.Namespace, case: Case, machine: Machine, passes: str) -> None:
    """Play calls under every kind of trouble, print a table, and perhaps draw it."""
    import numpy as np

    from cqs.event_simulation import Trouble, read_relative_times

    as_integer("--trials", options.trials, 1, _MAX_TRIALS)
    as_integer("--saves", options.saves, 0, MAX_NUM_TASKS)
    as_integer(
        "--tasks times --devices", max(options.tasks) * max(options.devices), 1, MAX_NUM_TASKS
    )
    trouble = Trouble(
        notice_seconds=options.notice,
        repair_seconds=options.repair,
        slow_share=options.slow[0],
        slow_factor=options.slow[1],
        relative_times=read_relative_times(options.spread) if options.spread else (1.0,),
    )
    rows, means = [], []
    for num_devices in options.devices:
        ideal = case.seconds_of_one(machine, passes) / num_devices
        ways = ways_to_work(case, num_devices, machine, passes, options.tasks, options.saves)
        for life_hours in options.life:
            deadly = replace(trouble, life_hours=life_hours)
            for name, play in ways.items():
                rng = np.random.default_rng(options.seed)
                # Of each call three numbers are kept; it lists every attempt at every task.
                calls = (play(deadly, rng) for _ in range(options.trials))
                kept = [(call.seconds, call.lost_seconds, call.num_deaths) for call in calls]
                seconds, *rest = np.array(kept).T
                lost, deaths = (column.mean() for column in rest)
                means.append(
                    (name, num_devices * ideal / 3600 / life_hours, seconds.mean() / ideal)
                )
                rows.append(
                    [
                        num_devices,
                        f"{life_hours:.0f}",
                        name,
                        f"{seconds.mean():.4g}",
                        f"{seconds.mean() / ideal:.3f}",
                        f"{np.quantile(seconds, 0.95) / ideal:.3f}",
                        f"{deaths:.2f}",
                        percent(lost / ideal / num_devices),
                    ]
                )
    header = ["devices", "life h", "way", "mean s", "over ideal", "95th", "deaths", "lost work"]
    print(format_table(header, rows))
    if options.picture:
        from cqs.curves import draw_trouble, save

        save(draw_trouble(means), options.picture)


def _machine(options: argparse.Namespace) -> Machine:
    """Return what the options describe; those that are given win over a fit."""
    machine = Machine()
    if options.fit:
        machine = fit(read_rows(options.fit))
        print(
            f"Fitted: {machine.rate / 1e12:.0f} TFLOP/s forward, "
            f"{machine.backward_rate / 1e12:.0f} backward, "
            f"{machine.per_row * 1e9:.2f} nanoseconds a row, "
            f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.latency * 1e6:.0f} microseconds"
        )
    given = {
        "rate": _scaled(options.rate, 1e12),
        "backward_rate": _scaled(options.backward_rate, 1e12),
        "per_row": _scaled(options.per_row, 1e-9),
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


def _lives(text: str) -> list[float]:
    try:
        return [_LIVES[part] if part in _LIVES else float(part) for part in text.split(",")]
    except ValueError:
        names = ", ".join(_LIVES)
        raise argparse.ArgumentTypeError(f"must be {names} or hours, got {text!r}") from None


def _slow(text: str) -> tuple[float, float]:
    try:
        share, factor = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be SHARE:FACTOR, got {text!r}") from None
    return share, factor
