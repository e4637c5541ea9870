"""Fit the cost model to measured rows, compare it with rows, and simulate failures."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.event_simulation import (
    FaultModel,
    Outcome,
    read_relative_times,
    simulate_steps,
    simulate_tasks,
)
from benchmarks.fitting import fit, read_rows
from benchmarks.plots.predictions import draw_predictions, save
from cqs.arguments import as_integer
from cqs.commands import simulate
from cqs.commands.options import parse_integers
from cqs.commands.written_files import check_written
from cqs.plotting import check_picture
from cqs.report.table import Table, percent
from cqs.scheduler.cost_model import predict
from cqs.scheduler.interest_sets import MAX_NUM_TASKS
from cqs.scheduler.machines import Machine
from cqs.scheduler.workload import Workload

_MAX_TRIALS = 100_000
_MTBF_HOURS = {"llama3": 54 * 24 * 16_384 / 419, "opt": 61 * 24 * 992 / 105}
"""Device hours per interruption. Llama 3 405B: 419 in 54 days on 16,384 devices (arXiv 2407.21783).
OPT-175B: 35 restarts by hand and some 70 others in two months on 992 (arXiv 2205.01068)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``cqs simulate``, and those of rows and failures."""
    simulate.add_arguments(parser)
    parser.add_argument(
        "--picture", metavar="FILE",
        help="plot the predictions against the number of devices, or what failures cost",
    )  # fmt: skip
    machine = parser.add_argument_group("rows of benchmarks")
    machine.add_argument(
        "--fit", metavar="FILE.jsonl", help="fit the machine to these rows of peers"
    )
    machine.add_argument(
        "--check",
        metavar="FILE.jsonl",
        help="compare such rows with predictions, and do nothing else",
    )
    faults = parser.add_argument_group("failures", "simulate calls on devices that vary and fail")
    faults.add_argument(
        "--mtbf", type=_mtbf, metavar="HOURS,...",
        help="mean time between failures of a device: hours, llama3 or opt; the options below "
        "require it",
    )  # fmt: skip
    faults.add_argument(
        "--tasks", type=parse_integers, default=[1, 4, 16], metavar="K,...",
        help="tasks per device; default: 1,4,16",
    )  # fmt: skip
    faults.add_argument(
        "--saves", type=int, default=15, metavar="S",
        help="how often steps save partial outputs; default: 15",
    )  # fmt: skip
    faults.add_argument(
        "--detection", type=float, default=10.0, metavar="SECONDS",
        help="until a lost task is assigned again; default: 10",
    )  # fmt: skip
    faults.add_argument(
        "--repair", type=float, default=600.0, metavar="SECONDS",
        help="until a failed device is replaced; default: 600",
    )  # fmt: skip
    faults.add_argument(
        "--slow", type=_slow, default=(0.0, 1.0), metavar="SHARE:FACTOR",
        help="this share of the devices is slower by this factor",
    )  # fmt: skip
    faults.add_argument("--spread", metavar="FILE.jsonl", help="let times vary as in these rows")
    faults.add_argument("--trials", type=int, default=100, metavar="T", help="default: 100")
    faults.add_argument("--seed", type=int, default=0, metavar="S", help="default: 0")


def run(options: argparse.Namespace) -> None:
    """Print predictions, or their errors."""
    if options.picture:
        check_picture(options.picture)
        check_written("--picture", options.picture, [options.fit, options.check, options.spread])
    simulate.check_options(options)
    for number in options.tasks:
        as_integer("--tasks", number, 1, MAX_NUM_TASKS)
    machine = simulate.read_machine(options, _fitted(options.fit) if options.fit else Machine())
    if options.check:
        print(check_table(options.check, machine))
        return
    case, passes = simulate.read_case(options), options.passes
    if options.mtbf:
        simulate_failures(options, case, machine, passes)
        return
    found = simulate.show_predictions(options, machine)
    if options.picture:
        save(draw_predictions(found, case.one_device_seconds(machine, passes)), options.picture)


def _fitted(path: str) -> Machine:
    """Fit the machine of the cost model to rows, and print it."""
    machine = fit(read_rows(path))
    print(
        f"Fitted: {machine.rate / 1e12:.0f} TFLOP/s forward, "
        f"{machine.backward_rate / 1e12:.0f} backward, "
        f"{machine.per_row * 1e9:.2f} nanoseconds a row, "
        f"{machine.bandwidth / 1e9:.0f} GB/s, {machine.latency * 1e6:.0f} microseconds"
    )
    return machine


def check_table(path: str, machine: Machine) -> str:
    """Return a table of measured and predicted times, and the largest deviation."""
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
    return f"{Table(header, cells)}\nThe largest deviation: {worst:.3f} of what was measured."


def make_schedules(
    case: Workload,
    num_devices: int,
    machine: Machine,
    passes: str,
    tasks: Sequence[int],
    num_saves: int,
) -> dict[str, Callable[[FaultModel, np.random.Generator], Outcome]]:
    """Return how each schedule is simulated, by name.

    Steps are those of a ring. Tasks are those of quorums on as many devices as there are tasks.
    More tasks per device send more bytes, and the communication of a task does not overlap with
    the previous task.
    """

    def seconds(method: str, num_devices: int) -> float:
        found = predict(method, case, num_devices, machine, passes)
        assert found is not None, "neither divides the heads"
        return found.seconds

    steps = partial(
        simulate_steps, seconds("ring", num_devices) / num_devices, num_devices, num_devices
    )
    schedules: dict[str, Callable[..., Outcome]] = {"steps": steps}
    if num_saves:
        schedules[f"steps, {num_saves} saves"] = partial(steps, num_saves=num_saves)
    for each in tasks:
        num_tasks = each * num_devices
        task_seconds = seconds("cqs quorums", num_tasks)
        schedules[f"tasks, {each} per device"] = partial(
            simulate_tasks, task_seconds, num_tasks, num_devices
        )
    return schedules


def simulate_failures(
    options: argparse.Namespace, case: Workload, machine: Machine, passes: str
) -> None:
    """Simulate calls at every failure rate, print a table, and draw it if a picture is named."""
    as_integer("--trials", options.trials, 1, _MAX_TRIALS)
    as_integer("--saves", options.saves, 0, MAX_NUM_TASKS)
    as_integer(
        "--tasks times --devices", max(options.tasks) * max(options.devices), 1, MAX_NUM_TASKS
    )
    faults = FaultModel(
        detection_seconds=options.detection,
        repair_seconds=options.repair,
        slow_share=options.slow[0],
        slow_factor=options.slow[1],
        relative_times=read_relative_times(options.spread) if options.spread else (1.0,),
    )
    rows, means = [], []
    for num_devices in options.devices:
        ideal = case.one_device_seconds(machine, passes) / num_devices
        schedules = make_schedules(case, num_devices, machine, passes, options.tasks, options.saves)
        for mtbf_hours in options.mtbf:
            at_rate = replace(faults, mtbf_hours=mtbf_hours)
            for name, schedule in schedules.items():
                rng = np.random.default_rng(options.seed)
                # Three numbers of each call are kept: an outcome lists every attempt at every task.
                calls = (schedule(at_rate, rng) for _ in range(options.trials))
                kept = [(call.seconds, call.lost_seconds, call.num_failures) for call in calls]
                seconds, *rest = np.array(kept).T
                lost, failures = (column.mean() for column in rest)
                means.append(
                    (name, num_devices * ideal / 3600 / mtbf_hours, seconds.mean() / ideal)
                )
                rows.append(
                    [
                        num_devices,
                        f"{mtbf_hours:.0f}",
                        name,
                        f"{seconds.mean():.4g}",
                        f"{seconds.mean() / ideal:.3f}",
                        f"{np.quantile(seconds, 0.95) / ideal:.3f}",
                        f"{failures:.2f}",
                        percent(lost / ideal / num_devices),
                    ]
                )
    header = ["devices", "MTBF h", "schedule", "mean s", "over ideal", "95th", "failures"]
    print(Table([*header, "lost work"], rows))
    if options.picture:
        from benchmarks.plots.failures import draw_failures

        save(draw_failures(means), options.picture)


def _mtbf(text: str) -> list[float]:
    try:
        return [_MTBF_HOURS.get(part) or float(part) for part in text.split(",")]
    except ValueError:
        names = ", ".join(_MTBF_HOURS)
        raise argparse.ArgumentTypeError(f"must be {names} or hours, got {text!r}") from None


def _slow(text: str) -> tuple[float, float]:
    try:
        share, factor = map(float, text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be SHARE:FACTOR, got {text!r}") from None
    return share, factor
