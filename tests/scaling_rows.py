"""Rows of reports that nobody measured."""

from dataclasses import replace

from cqs.report.rows import RepeatTimes, TaskBytes, make_row
from cqs.report.settings import Settings
from cqs.scheduler import make_plan

MANY = (1, 2, 3, 4, 7, 8, 13, 31, 57, 111)


def make_rows(workers=MANY, executor="local", passes="forward", tokens=8192, **options):
    """Return a row for each number of workers: of time 1 / W, of memory 1 / sqrt(W)."""
    settings = Settings(executor, tokens, 8, 8, 64, "float32", repeats=2, **options)
    kind = {"is_causal": settings.is_causal, "pattern": settings.make_pattern()}
    rows = []
    for number in workers:
        size = int(2**26 * number**-0.5)
        turn = RepeatTimes(
            [1.2 / number] * (number - 1) + [1.3 / number],
            one=1.2,
            dense=1.1,
            merge=1e-3 * number,
            whole=1.4 / number,
            transfer=None if executor == "local" else 2e-3 * number,
        )
        held = TaskBytes(size if passes == "forward" else None, size + 2**20, size // 2, size // 5)
        rows.append(
            make_row(
                settings,
                passes,
                make_plan(tokens, num_tasks=number, **kind),
                turns=[turn, turn],
                held=[held] * number,
                one_bytes=2**26 + 2**20,
                num_devices=min(number, 2) if executor == "ray" else number,
            )
        )
    return [replace(row, load_average=0.0) for row in rows]
