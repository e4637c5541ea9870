"""The tables of results that the pages show, as functions of rows."""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import fitting
from benchmarks.cover_search import least_size
from cqs.report.measurement import read_rows
from cqs.scheduler import load_interest_set

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]
"""The JSON object of a measurement."""

_PASSES = "forward", "backward", "both"
_METHODS = ("cqs", "cqs quorums", "ring", "all-gather", "ulysses", "ulysses in two")
_OF_DIFFUSERS = "ulysses", "ring", "ulysses anything", "ring anything"
_HEADLINE = {
    "one GPU": "one",
    "**cqs**": "cqs",
    "ring attention": "ring",
    "Ulysses": "ulysses",
    "PyTorch context parallelism (cuDNN)": "torch",
    "all-gather": "all-gather",
}
"""Labels of methods, and their names in rows."""
_PUBLISHED_SHARES = {4: "75 %", 7: "42.87 %", 8: "50 %", 31: "19.36 %"}
"""Longest subsequence relative to the sequence in Bian and Somani, IEEE Access 2025."""


@cache
def rows_of(name: str) -> Sequence[Row]:
    """Return the rows of a file in ``benchmarks/results``."""
    return read_rows(RESULTS / f"{name}.jsonl", lambda row: [row])


def find_rows(rows: Sequence[Row], **fields: object) -> list[Row]:
    """Return the rows with such values of fields."""
    return [row for row in rows if all(row[name] == each for name, each in fields.items())]


def find_row(rows: Sequence[Row], **fields: object) -> Row:
    """Return the only row with such values of fields."""
    (row,) = find_rows(rows, **fields)
    return row


def to_markdown(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, num_labels: int = 1
) -> str:
    """Return a table; columns after the labels are right-aligned.

    Example:
        >>> print(to_markdown(["tokens", "ms"], [["16K", 3.7], ["32K", ""]]))
        | tokens | ms |
        |---|--:|
        | 16K | 3.7 |
        | 32K | |
    """
    rule = "|".join(["---"] * num_labels + ["--:"] * (len(header) - num_labels))
    lines = [" ".join(f"| {cell}".rstrip() for cell in cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def mark_best(cells: Sequence[str], best: Callable[..., float] = max) -> list[str]:
    """Return cells with the best figure in bold, all of them if several are equal.

    Example:
        >>> mark_best(["98 %", "", "97 %", "98 %"])
        ['**98 %**', '', '97 %', '**98 %**']
    """
    figures = [_figure(cell) for cell in cells]
    wanted = best((each for each in figures if each is not None), default=None)
    return [
        f"**{cell}**" if wanted is not None and figure == wanted else cell
        for cell, figure in zip(cells, figures, strict=True)
    ]


def _figure(cell: str) -> float | None:
    found = re.match(r"[\d.,]+", cell)
    return float(found[0].replace(",", "")) if found else None


def _mark_columns(rows: Sequence[Sequence[str]], best: Callable[..., float]) -> list[list[str]]:
    columns = [mark_best(column, best) for column in zip(*rows, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _milliseconds(row: Row) -> str:
    number = row["median_ms"]
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


def _percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def _length(tokens: int) -> str:
    """Write a number of tokens in units of 1024, or of 1024^2."""
    return f"{tokens // 2**20}M" if tokens % 2**20 == 0 else f"{tokens // 1024}K"


# Peers


def headline() -> str:
    """Two GPUs, 128K causal tokens, forward and backward: time and memory by method."""
    columns = []
    for name, suffix in (("peers-h200-x2-best", "-best"), ("peers-h200-x2-rectangles", "")):
        case = f"causal-131072-h16-kv16-d128{suffix}"
        rows = find_rows(rows_of(name), case=case, benchmark="peers both")
        found = {row["executor"]: row for row in rows}
        columns.append({key: f"{row['median_ms']:.0f}" for key, row in found.items()})
        columns.append(
            {key: f"{row['details']['peak_bytes'] / 2**30:.1f}" for key, row in found.items()}
        )
    cells = [[column.get(key, "") for column in columns] for key in _HEADLINE.values()]
    return to_markdown(
        ["method", "FlashAttention-4, ms", "GiB", "our Triton kernels, ms", "GiB"],
        [[label, *row] for label, row in zip(_HEADLINE, _mark_columns(cells, min), strict=True)],
    )


def _cases(rows: Sequence[Row], heads: str) -> list[tuple[str, str, dict[str, Row]]]:
    """Return label, pass, and row by method of all cases with such heads, in order of length."""
    found: dict[tuple[int, str, int], dict[str, Row]] = {}
    for row in rows:
        kind, tokens, shape = row["case"].split("-", 2)
        if shape == heads:
            passes = _PASSES.index(row["benchmark"].partition(" ")[2])
            found.setdefault((int(tokens), kind, passes), {})[row["executor"]] = row
    order = sorted(found, key=lambda key: (key[0], key[1] == "causal", key[2]))
    return [
        (
            _length(tokens) + (" causal" if kind == "causal" else ""),
            _PASSES[passes],
            found[tokens, kind, passes],
        )
        for tokens, kind, passes in order
    ]


def _by_method(
    of_case: dict[str, Row], methods: Sequence[str], show: Callable[[Row], str]
) -> list[str]:
    """Return a cell for every method, empty if it has no row."""
    return [show(of_case[method]) if method in of_case else "" for method in methods]


def peers(name: str, heads: str) -> str:
    """Milliseconds of one GPU, and the efficiency of every method."""
    return to_markdown(
        ["tokens", "pass", "one", *(f"`{method}`" for method in _METHODS)],
        [
            [label, passes, _milliseconds(of_case["one"])]
            + mark_best(
                _by_method(of_case, _METHODS, lambda row: _percent(row["details"]["efficiency"]))
            )
            for label, passes, of_case in _cases(rows_of(name), heads)
        ],
        num_labels=2,
    )


def networks() -> str:
    """Hosts with slow links: time of cqs relative to the fastest other method, and its name."""
    found: dict[tuple[int, int, bool, bool], dict[str, float]] = {}
    for row in rows_of("networks-cpu"):
        is_both, is_causal = row["benchmark"] == "peers both", row["case"].startswith("causal")
        case = -row["details"]["kv_heads"], row["num_tasks"], is_both, is_causal
        found.setdefault(case, {})[row["executor"]] = row["median_ms"]
    table: dict[tuple[int, int], list[str]] = {}
    for (kv_heads, number, *_), times in sorted(found.items()):
        others = [name for name in times if name != "cqs"]
        best = min(others, key=lambda name: times[name])
        table.setdefault((-kv_heads, number), []).append(f"{times['cqs'] / times[best]:.2f} {best}")
    header = ["KV heads", "hosts"]
    header += [f"{passes}, {kind}" for passes in _PASSES[::2] for kind in ("non-causal", "causal")]
    return to_markdown(header, [[*key, *cells] for key, cells in table.items()], num_labels=2)


def limited() -> str:
    """Time in the memory of a ring, and of a ring, relative to the usual exchange."""
    rows = rows_of("limited-cpu")
    return to_markdown(
        ["attention", "KV heads", "pass", "`max_bytes` of a ring", "ring"],
        [
            ["causal" if "causal" in label else "non-causal", kv_heads, passes, *(
                f"{of_case[method]['ratio']:.2f}" for method in ("cqs limited", "ring")
            )]
            for kv_heads in (8, 2)
            for label, passes, of_case in _cases(rows, f"h8-kv{kv_heads}-d64")
        ],
        num_labels=3,
    )  # fmt: skip


def peer_times(name: str, heads: str, digits: int = 1) -> str:
    """Milliseconds of one GPU, and of every method."""
    cases, rows = _cases(rows_of(name), heads), []
    methods = ["cqs", "cqs quorums", "ring", "all-gather", "ulysses", "torch"]
    methods = [method for method in methods if any(method in of_case for *_, of_case in cases)]
    for label, passes, of_case in cases:
        one, *cells = _by_method(
            of_case, ["one", *methods], lambda row: f"{row['median_ms']:.{digits}f}"
        )
        rows.append([label, passes, one, *mark_best(cells, min)])
    header = ["tokens", "pass", "one", *(f"`{method}`" for method in methods)]
    return to_markdown(header, rows, num_labels=2)


def peer_loops() -> str:
    """Milliseconds of a call of every method in a loop of calls, on two and four GPUs."""
    methods, rows = ("cqs", "ring", "all-gather", "ulysses", "torch"), []
    for number, heads in ((2, (16, 16)), (4, (16, 16)), (4, (32, 8))):
        for label, passes, of_case in _cases(
            rows_of(f"peers-h100-x{number}-loops"), "h{}-kv{}-d128".format(*heads)
        ):
            times = _by_method(of_case, methods, lambda row: f"{row['details']['loop_ms']:.2f}")
            rows.append([number, "{} / {}".format(*heads), label, passes, *mark_best(times, min)])
    header = ["GPUs", "heads", "tokens", "pass", *(f"`{method}`" for method in methods)]
    return to_markdown(header, rows, num_labels=4)


def peer_shapes(name: str, *left_out: str) -> str:
    """Milliseconds of every method, by pattern, tokens and heads, but some numbers of heads."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows_of(name):
        pattern, tokens, heads, kv_heads, _ = row["case"].rsplit("-", 4)
        if heads not in left_out:
            method = row["executor"].removesuffix(" padded")
            key = pattern, tokens, f"{heads[1:]}:{kv_heads[2:]}", row["benchmark"][len("peers ") :]
            found.setdefault(key, {})[method] = f"{row['median_ms']:.2f}"
    methods = "cqs", "ring", "all-gather", "ulysses"
    header = ["pattern", "tokens", "heads", "pass", "one", *(f"`{method}`" for method in methods)]
    rows = [
        [*key, of_case["one"], *mark_best([of_case.get(method, "") for method in methods], min)]
        for key, of_case in found.items()
    ]
    return to_markdown(header, rows, num_labels=4)


def efficiency_ranges() -> str:
    """Lowest and highest efficiency on two GPUs over all measured cases."""
    rows = []
    for passes in ("forward", "both"):
        cells = [passes]
        for method in ("ring", "cqs", "cqs quorums"):
            values = [
                100 * row["details"]["efficiency"]
                for row in find_rows(
                    rows_of("peers-h200-x2-rectangles"),
                    benchmark=f"peers {passes}",
                    executor=method,
                )
            ]
            cells.append(f"{min(values):.0f} to {max(values):.0f} %")
        rows.append(cells)
    return to_markdown(["pass", "ring", "`cqs`", "quorums alone"], rows)


def fit() -> str:
    """Times of four GPUs as predicted by the cost model that is fitted to two."""
    fitted, measured = (
        fitting.read_rows(RESULTS / f"peers-h200-{name}.jsonl") for name in ("x2", "x4")
    )
    machine = fitting.fit(fitted)
    rows = []
    for label, each in (("two GPUs, fitted", fitted), ("four GPUs, from the fit", measured)):
        errors = [abs(row.ratio(machine) - 1) for row in each]
        within = [sum(error < most for error in errors) for most in (0.05, 0.1)]
        rows.append([label, len(errors), *within])
    return to_markdown(["rows", "times", "within 5 %", "within 10 %"], rows)


# One device


def split_on_cpu() -> str:
    """Time of all tasks relative to one call of PyTorch, and the overhead of Ray, on a CPU."""
    rows, columns = rows_of("cpu"), [(w, kind) for w in (7, 13) for kind in ("full", "causal")]

    def cells(benchmark: str, shape: str, show: Callable[[Row], str]) -> list[str]:
        return [
            show(find_row(rows, benchmark=benchmark, case=f"{kind}-{shape}", num_tasks=w))
            for w, kind in columns
        ]

    def over_torch(row: Row) -> str:
        return f"{row['details']['over_torch']:.2f}"

    def overhead(row: Row) -> str:
        return _percent(row["details"]["overhead"], 1)

    return to_markdown(
        ["", *(f"W = {w}, {kind}" for w, kind in columns)],
        [
            ["W tasks in one process, to one call"]
            + cells("tasks forward", "8192-h8-d64", over_torch),
            ["the same, forward and backward"]
            + cells("tasks forward and backward", "8192-h8-d64", over_torch),
            ["put, fetch, return, merge and waiting on Ray"]
            + cells("ray", "16384-h8-d64", overhead),
        ],
    )


def tasks() -> str:
    """Time of all tasks on one GPU relative to one call, non-causal / causal."""
    rows, numbers = rows_of("h200"), (7, 8, 13, 31)

    def ratio(**fields: object) -> str:
        return f"{find_row(rows, **fields)['ratio']:.2f}"

    return to_markdown(
        ["passes", "tokens", "tasks", *(f"W = {number}" for number in numbers)],
        [
            [passes, _length(tokens), label]
            + [
                " / ".join(
                    ratio(
                        benchmark=f"tasks {passes}",
                        case=f"{kind}-{tokens}-h16-d128",
                        executor=executor,
                        num_tasks=number,
                    )
                    for kind in ("full", "causal")
                )
                for number in numbers
            ]
            for passes in ("forward", "forward and backward")
            for tokens in (2**14, 2**16, 2**17)
            for label, executor in (("together", "local"), ("one by one", "one by one"))
        ],
        num_labels=3,
    )


def kernels() -> str:
    """TFLOP/s of single calls; the best of each column and pass in bold."""
    labels = {
        "triton": "`triton` (Hopper kernels)",
        "flash": "`flash` (FlashAttention-4, 4.0.0b36)",
        "cudnn": "cuDNN",
        "flex": "FlexAttention",
    }
    columns = [(head_dim, kind) for head_dim in (128, 64) for kind in ("full", "causal")]
    rows = []
    for passes, executors in (("forward", [*labels]), ("backward", [*labels][:3])):
        cells = [
            [
                "{:.0f}".format(
                    find_row(
                        rows_of("kernels-h100"),
                        benchmark=f"kernels {passes}",
                        executor=executor,
                        case=f"{kind}-16384-h16-d{head_dim}",
                    )["details"]["tflops"]
                )
                for head_dim, kind in columns
            ]
            for executor in executors
        ]
        for executor, of_kernel in zip(executors, _mark_columns(cells, max), strict=True):
            rows.append([f"{passes}, {labels[executor]}", *of_kernel])
    header = [f"d = {head_dim}" + ", causal" * (kind == "causal") for head_dim, kind in columns]
    return to_markdown(["", *header], rows)


def accuracy(dtype: str) -> str:
    """Relative errors of output and gradients against float64."""
    labels = {
        "PyTorch, cuDNN": "PyTorch, cudnn",
        "PyTorch, flash": "PyTorch, flash",
        **{f"`triton`, W = {w}": f"triton, W = {w}" for w in (1, 7, 31)},
        **{f"`flash`, W = {w}": f"flash, W = {w}" for w in (1, 7)},
        "`cudnn`, W = 7": "cudnn, W = 7",
    }
    fields = "output", "grad_query", "grad_key", "grad_value"
    rows = []
    for label, executor in labels.items():
        row = find_row(rows_of("h200"), benchmark="accuracy", executor=executor, dtype=dtype)
        errors = (f"{row['details'][name]:.3e}".replace("e-0", "e-") for name in fields)
        rows.append([label, *errors])
    return to_markdown([dtype, "output", "dQ", "dK", "dV"], rows)


def memory() -> str:
    """Memory of a task relative to one, with scores in memory and with fused kernels."""
    rows = rows_of("memory-h100")
    fused = {row["num_tasks"]: row for row in find_rows(rows, tokens=rows[-1]["tokens"])}
    table = []
    for row in rows_of("report-cpu-reference"):
        number, cells = row["num_tasks"], ["", "", ""]
        if number in fused:
            found = fused[number]
            cells = [
                _percent(found["peak_bytes"] / fused[1]["peak_bytes"], 1),
                f"{found['peak_bytes'] / found['predicted_bytes']:.3f}",
                f"{found['ratio']:.3f}",
            ]
        longest = _percent(row["held_tokens"] / row["tokens"], 1)
        kept = _percent(row["peak_bytes"] / row["one_bytes"], 1)
        shares = _percent(1 / number, 1), kept, _percent(number**-0.5, 1)
        table.append([number, longest, _PUBLISHED_SHARES.get(number, ""), *shares, *cells])
    header = ["W", "longest subsequence", "published", "1/W", "scores in memory", "1/sqrt(W)"]
    header += ["fused kernels", "measured / predicted", "time / W = 1"]
    return to_markdown(header, table, num_labels=0)


def bottleneck() -> str:
    """Milliseconds of a layer, and the share of attention, dense and with a pattern."""
    found: dict[tuple[str, int], dict[bool, Row]] = {}
    for row in rows_of("bottleneck-h100"):
        case = row["case"].rpartition("-")[0], row["details"]["tokens"]
        found.setdefault(case, {})[row["executor"] == "dense"] = row
    rows = [
        [
            model,
            f"{tokens:,}",
            *(f"{row['median_ms']:.1f}" for row in (by[True], by[False])),
            *(_percent(row["ratio"]) for row in (by[True], by[False])),
        ]
        for (model, tokens), by in found.items()
    ]
    header = ["model", "tokens", "dense, ms", "pattern, ms", "attention, dense", "with pattern"]
    return to_markdown(header, rows)


def numbers_of_tasks() -> str:
    """What reports of a CPU and of a GPU measured for each number of tasks."""
    reports = [
        {row["num_tasks"]: row for row in rows_of(f"report-{name}")} for name in ("cpu", "h200")
    ]
    columns = ["responsibility ratio", "measured / predicted bytes", "times as fast as one call"]
    rows = []
    for number, row in reports[0].items():
        cells = [str(number), _percent(row["held_tokens"] / row["tokens"], 1)]
        for report in reports:
            if number not in report:
                cells += [""] * len(columns)
                continue
            found = report[number]
            ratio = f"{found['responsibility_ratio']:#.4g}".rstrip(".")
            cells += [ratio, f"{found['peak_ratio']:.3f}", f"{found['speedup']:#.3g}"]
        rows.append(cells)
    header = ["W", "holds"]
    for device in ("CPU", "H200"):
        header += [f"{device}: {columns[0]}", *columns[1:]]
    return to_markdown(header, rows, num_labels=0)


def streaming() -> str:
    """Time and memory of attention under a memory budget."""
    found = []
    for row in rows_of("streaming-h200"):
        passes = row["benchmark"].removeprefix("streaming ")
        if passes in ("forward", "both"):
            kind, tokens, shape = row["case"].split("-", 2)
            head_dim = int(shape.rpartition("-d")[2])
            order = passes == "both", int(tokens), -head_dim, kind == "causal"
            found.append((order, head_dim, row))
    rows = []
    for (is_both, tokens, _, is_causal), head_dim, row in sorted(found, key=lambda each: each[0]):
        peak, predicted, budget = (
            f"{row['details'][name] / 2**20:.0f}"
            for name in ("peak_bytes", "predicted_bytes", "budget")
        )
        rows.append(
            [
                f"{_length(tokens)}, {head_dim}",
                ("both" if is_both else "forward") + ", causal" * is_causal,
                f"{row['median_ms'] / 1e3:.2f}",
                f"{row['ratio']:.2f}",
                f"{peak}, {predicted}",
                budget,
            ]
        )
    header = ["tokens, d", "", "seconds", "to resident", "peak MiB, predicted", "budget"]
    return to_markdown(header, rows, num_labels=2)


# Patterns


def patterns_on_gpu() -> str:
    """Useful TFLOP/s of patterns, and the time of FlexAttention relative to ours."""
    rows = rows_of("patterns-h200")
    names = dict.fromkeys(
        row["case"].rpartition("-")[0] for row in rows if row["case"].endswith("-65536")
    )
    columns = [(tokens, passes) for tokens in (2**14, 2**16) for passes in _PASSES[:2]]
    gains: dict[tuple[int, str], list[float]] = {column: [] for column in columns}

    def of_pattern(name: str, tokens: int, passes: str, executor: str) -> Row:
        return find_row(
            rows, benchmark=f"patterns {passes}", case=f"{name}-{tokens}", executor=executor
        )

    table = []
    for name in names:
        density = of_pattern(name, 2**16, "forward", "cqs")["details"]["density"]
        cells = [name, f"{100 * density:.3g} %"]
        for tokens, passes in columns:
            ours, flex = (of_pattern(name, tokens, passes, by) for by in ("cqs", "flex"))
            gain = flex["median_ms"] / ours["median_ms"]
            gains[tokens, passes].append(gain)
            cells.append(f"{ours['details']['useful_tflops']:.0f} ({gain:#.3g})")
        table.append(cells)
    means = (math.exp(sum(map(math.log, each)) / len(each)) for each in gains.values())
    table.append(["geometric mean", "", *(f"({mean:.2f})" for mean in means)])
    header = [f"{_length(tokens)} {passes}" for tokens, passes in columns]
    return to_markdown(["", "density at 64K", *header], table)


def patterns_on_cpu() -> str:
    """Speed-up of patterns over dense attention, and that times their density."""
    labels = {
        "`sliding_window`, 10 %": "window-10",
        "causal window, 10 %": "causal-window-10",
        "`sliding_window`, 25 %": "window-25",
        "causal window, 22 %": "causal-window-25",
        "`sliding_window`, 50 %": "window-50",
        "causal window, 37.5 %": "causal-window-50",
        "`dilated`, every 4th": "every-4",
        "`dilated`, every 16th": "every-16",
        "`block_diagonal(512)`": "block-diagonal-512",
    }
    table = []
    for label, name in labels.items():
        cells = [label]
        for tokens in (2048, 8192, 32768):
            row = find_row(
                rows_of("patterns-cpu"),
                benchmark="patterns forward",
                case=f"{name}-{tokens}",
                executor="cqs",
            )
            gain = 1 / row["ratio"]
            cells.append(f"{gain:.1f} ({gain * row['details']['density']:.2f})")
        table.append(cells)
    return to_markdown(["", "2048", "8192", "32,768"], table)


def short_patterns() -> str:
    """Times of short calls with a pattern and of ``scaled_dot_product_attention`` with its mask."""
    times: dict[int, dict[str, list[float]]] = {}
    for row in find_rows(rows_of("short-cpu"), benchmark="patterns forward"):
        of_length = times.setdefault(row["details"]["tokens"], {})
        of_length.setdefault(row["executor"], []).append(row["median_ms"])
    table = []
    for tokens, of_length in sorted(times.items()):
        pairs = list(zip(of_length["cqs"], of_length["masked"], strict=True))
        ratios = [one / other for one, other in pairs]
        most = max(1e3 * (one - other) for one, other in pairs)
        middle = 1e3 * statistics.median(of_length["masked"])
        shares = f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        table.append([f"{tokens}", f"{len(pairs)}", f"{middle:.0f}", *shares, f"{most:.0f}"])
    header = ["tokens", "patterns", "with a mask, us", "median", "least", "most", "most us more"]
    return to_markdown(header, table)


# Layers and clusters


def layer_lengths() -> str:
    """Milliseconds of a step of a layer on four GPUs, by length and mesh."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for row in rows_of("block-h100-x4"):
        layer, tokens, _ = row["case"].split("-", 2)
        mesh = row["executor"].partition(" ")[2].replace("x", " x ")
        found.setdefault((layer, int(tokens)), {})[mesh] = f"{row['median_ms']:.1f}"
    table = [
        [layer, f"{tokens:,}", *mark_best(list(meshes.values()), min)]
        for (layer, tokens), meshes in found.items()
    ]
    return to_markdown(["layer", "tokens", *next(iter(found.values()))], table, num_labels=2)


def sharded() -> str:
    """Milliseconds per call inside the workers, and through the cluster."""
    rows = find_rows(rows_of("sharded-h200"), benchmark="sharded")
    table = []
    kinds = {(_tokens_of(row["case"]), row["num_tasks"], row["case"]) for row in rows}
    for tokens, number, case in sorted(kinds):
        inside, *others = (
            find_row(rows, case=case, num_tasks=number, executor=name)
            for name in ("in the workers", "ray, one call", "ray, a call each")
        )
        cells = [f"{row['median_ms']:.2f} (+{100 * (row['ratio'] - 1):.2g} %)" for row in others]
        table.append([_length(tokens), number, f"{inside['median_ms']:.2f}", *cells])
    header = ["tokens", "GPUs", "in the workers", "in one call of the cluster", "a call each"]
    return to_markdown(header, table)


def ray_on_gpus(machines: Sequence[tuple[int, str]], tokens: int) -> str:
    """Milliseconds of runs on Ray actors with GPUs, and their time relative to one process."""
    passes = {
        "host, non-causal, forward": ("ray", "full", "host"),
        "GPU, non-causal, forward": ("ray", "full", "gpu"),
        "GPU, non-causal, both": ("ray both", "full", "gpu"),
        "GPU, causal, forward": ("ray", "causal", "gpu"),
        "GPU, causal, both": ("ray both", "causal", "gpu"),
    }
    others = (7, 13, 31)
    table = []
    for num_actors, gpu in machines:
        rows = rows_of(f"ray-{gpu.lower()}-x{num_actors}")
        for label, (benchmark, mask, place) in passes.items():
            case = f"{mask}-{tokens}-h16-d128-{place}"
            if found := find_rows(rows, benchmark=benchmark, case=case):
                cells = [find_row(found, num_tasks=number) for number in (num_actors, *others)]
                times = (f"{row['median_ms']:.0f} ({row['ratio']:.2f})" for row in cells)
                table.append([f"{num_actors} {gpu}s", label, *times])
    header = ["actors", "tensors, mask, passes", "W = actors", *(f"W = {n}" for n in others)]
    return to_markdown(header, table, num_labels=2)


def packed() -> str:
    """Planning time, balance and bytes moved of packed documents."""
    names = {"one-long": "one long", "pile": "Pile", "prolong64k": "ProLong 64K"}
    names |= {"prolong512k": "ProLong 512K"}
    table = []
    for row in rows_of("packed-cpu"):
        (name, tokens), details = row["case"].rsplit("-", 1), row["details"]
        table.append(
            [
                f"{_length(int(tokens))}, {row['num_tasks']}",
                names.get(name, name),
                f"{details['best_ms']:.1f}",
                f"{details['balance']:.3f}",
                f"{details['balance_at_home']:.2f}",
                f"{row['ratio']:.2f}, {details['most_bytes']:.2f}",
            ]
        )
    header = ["tokens, ranks", "lengths", "ms", "busiest / mean", "at home", "bytes"]
    return to_markdown(header, table, num_labels=2)


def host(name: str) -> str:
    """Microseconds of the host for a call, of one process and of two ranks."""
    labels = {
        "scaled_dot_product_attention": "`scaled_dot_product_attention`",
        "local": "`cqs.attention`",
        "2 ranks": "`cqs.distributed.attention`, two ranks",
    }
    passes = "forward", "forward, recorded", "forward + backward"
    table = []
    for executor, label in labels.items():
        rows = (
            find_row(rows_of(name), benchmark=f"host {each}", executor=executor) for each in passes
        )
        table.append([label, *(f"{1e3 * row['median_ms']:.0f}" for row in rows)])
    header = ["call", "forward", "forward with gradients", "forward and backward"]
    return to_markdown(header, table)


def speed_ups(name: str, methods: Sequence[str]) -> str:
    """Tokens per second of steps of a model on one GPU, and speed-ups of methods."""
    table, rows = [], rows_of(name)
    for alone in find_rows(rows, executor="sdpa"):
        ratios = {row["executor"]: row["ratio"] for row in find_rows(rows, case=alone["case"])}
        cells = [f"{1 / ratios[by]:.2f}" if by in ratios else "-" for by in methods]
        speed = f"{alone['details']['tokens_per_second']:,.0f}"
        table.append([*alone["case"].rsplit("-", 1), speed, *cells])
    return to_markdown(["model", "tokens", "`sdpa`, tokens/s", *methods], table, num_labels=2)


def judged() -> str:
    """Cases of other projects' test suites: passed, refused by option, and failed."""
    table: list[list[object]] = []
    totals = [0, 0, 0, 0]
    for row in rows_of("judged"):
        refused = row["refused"]
        options = ", ".join(f"{name} ({refused[name]})" for name in sorted(refused))
        counts = [row["passed"], sum(refused.values()), len(row["failed"])]
        counts.insert(0, sum(counts))
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        table.append([row["suite"], row["version"], *counts, options])
    header = ["suite", "version", "cases", "passed", "refused", "failed", "refused options"]
    return to_markdown(header, [*table, ["total", "", *totals, ""]], num_labels=2)


def transformer_outcomes() -> str:
    """Numbers of families of transformers by outcome."""
    rows = rows_of("transformers-families")
    meanings = {
        "computed": (
            "outputs and gradients equal those of eager attention, or of `sdpa` where noted below"
        ),
        "refused": "an error names the layer and the reason",
        "own attention": "no layer uses the `AttentionInterface`; results do not change",
        "no attention": "the models have no attention",
        "not made": "no tiny model was made, for lack of a package or an input",
        "fails": "another error",
        "differs": "other results",
    }
    table = [
        [outcome, meaning, len(find_rows(rows, outcome=outcome))]
        for outcome, meaning in meanings.items()
    ]
    header = ["outcome", "meaning", "families"]
    return to_markdown(header, [*table, ["total", "", len(rows)]], num_labels=2)


def transformer_families() -> str:
    """Families of transformers by outcome and feature or reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows_of("transformers-families"):
        outcome, details = row["outcome"], row.get("features") or [""]
        if outcome in ("refused", "fails", "differs"):
            details = [row["reason"].replace("|", "\\|")]
        for detail in details:
            groups.setdefault((outcome, detail), []).append(row["family"])
    order = ["computed", "refused", "fails", "differs", "own attention", "no attention", "not made"]
    found = sorted(groups, key=lambda each: (order.index(each[0]), each[1] == "", each[1]))
    table = [[*key, ", ".join(groups[key])] for key in found]
    return to_markdown(["outcome", "feature or reason", "families"], table, num_labels=3)


def _tokens_of(case: str) -> int:
    return int(case.split("-")[1])


def recovery() -> str:
    """Seconds of passes in which workers were killed."""
    moments = {
        " in exchange": "exchange",
        " in compute": "compute",
        " in return": "return",
        " in any call": "any call of 64 layers, two calls each",
        "": "any",
    }
    rows = [row for row in rows_of("sharded-h200") if " killed" in row["executor"]]
    table = []
    for suffix, moment in moments.items():
        found = [row for row in rows if row["executor"].partition(" killed")[2] == suffix]
        for row in sorted(found, key=lambda row: row["num_tasks"]):
            killed = re.search(r"\d+", row["executor"])
            assert killed is not None
            calm = f"{row['median_ms'] / row['ratio'] / 1e3:.1f}"
            table.append(
                [
                    f"{killed[0]} of {row['num_tasks']}",
                    moment,
                    _length(_tokens_of(row["case"])),
                    row["repeats"],
                    f"{row['median_ms'] / 1e3:.1f}",
                    f"{row['details']['longest_ms'] / 1e3:.1f}",
                    calm,
                ]
            )
    columns = ["passes", "median s", "longest s", "without failures, s"]
    return to_markdown(["killed", "moment", "tokens", *columns], table, num_labels=3)


def covers() -> str:
    """Elements of the stored interest set of each W, and the lower bound where it is smaller."""

    def cell(number: int) -> str:
        size, least = len(load_interest_set(number)), least_size(number)
        return str(size) if size == least else f"{size} ({least})"

    rows = [
        [f"{first} ..", *(cell(number) for number in range(max(first, 1), first + 10))]
        for first in range(0, 300, 10)
    ]
    rows[0].insert(1, "")
    return to_markdown(["W", *map(str, range(10))], [*rows, ["300", cell(300)] + 9 * [""]])


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "peers-two": partial(peer_times, "peers-h200-x2-rectangles", "h16-kv16-d128", 2),
    "peers-two-gqa": partial(peer_times, "peers-h200-x2-rectangles", "h32-kv8-d128", 2),
    "peers-two-flash": partial(peer_times, "peers-h200-x2-best", "h16-kv16-d128-best"),
    "peers-four": partial(peer_times, "peers-h200-x4-rectangles", "h16-kv16-d128", 2),
    "peers-four-gqa": partial(peer_times, "peers-h200-x4-rectangles", "h32-kv8-d128", 2),
    "peers-video": partial(peer_shapes, "peers-h100-x4-rectangles", "h16", "h32"),
    "peers-patterns": partial(peer_shapes, "patterns-h200-x2"),
    "peers-loops": peer_loops,
    "peers-messages": partial(peers, "peers-h200-x2-messages", "h16-kv16-d128"),
    "networks": networks,
    "covers": covers,
    "limited": limited,
    "efficiency-ranges": efficiency_ranges,
    "fit": fit,
    "split-cpu": split_on_cpu,
    "tasks": tasks,
    "kernels": kernels,
    "accuracy": partial(accuracy, "bfloat16"),
    "memory": memory,
    "bottleneck": bottleneck,
    "numbers-of-tasks": numbers_of_tasks,
    "streaming": streaming,
    "patterns-gpu": patterns_on_gpu,
    "patterns-cpu": patterns_on_cpu,
    "short-cpu": short_patterns,
    "layer-lengths": layer_lengths,
    "packed": packed,
    "host-gpu": partial(host, "host-h100-x2"),
    "ray-gpus": partial(ray_on_gpus, ((2, "H100"), (2, "H200"), (4, "H200")), 131_072),
    "ray-gpus-64k": partial(ray_on_gpus, ((2, "H100"), (4, "H100")), 65_536),
    "sharded": sharded,
    "recovery": recovery,
    "model": partial(speed_ups, "model-h200-x2", ["cqs one", "cqs", "torch"]),
    "denoise": partial(speed_ups, "denoise-h200-x2", ["cqs", *_OF_DIFFUSERS]),
    "judged": judged,
    "transformer-families": transformer_families,
    "transformer-outcomes": transformer_outcomes,
}
"""Name of a table in a page -> function that returns its Markdown."""
