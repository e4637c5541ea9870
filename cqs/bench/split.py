"""What cutting costs: W tasks in this process against one call of PyTorch on the same device."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import cqs
from cqs.bench.measurement import Measurement, append_rows, summarize
from cqs.cases import Case
from cqs.commands.table import format_table
from cqs.testing import assert_tracks_exact, exact_rows

_NUM_WORKERS = (1, 7, 13, 31)


def run(*, tokens: int | None = None, repeats: int = 9, out: str | None = None) -> None:
    """Check and time every W, causal and not, interleaved with the baseline.

    Args:
        tokens: Sequence length; ``None`` means 8192 on the CPU, 65,536 on a GPU.
        repeats: How often each is timed.
        out: File to append rows to, or ``None``.
    """
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    tokens = tokens or (65536 if on_gpu else 8192)
    heads, head_dim = (16, 128) if on_gpu else (8, 64)
    rows = []
    for is_causal in (False, True):
        kind = "causal" if is_causal else "full"
        case = Case(kind, tokens, tokens, heads, heads, head_dim, is_causal=is_causal)
        problem = case.make(dtype, device)
        tensors = problem.query, problem.key, problem.value

        def baseline() -> torch.Tensor:
            return F.scaled_dot_product_attention(*tensors, is_causal=is_causal)  # noqa: B023

        def split(num_workers: int) -> torch.Tensor:
            output = cqs.attention(*tensors, is_causal=is_causal, num_workers=num_workers)  # noqa: B023
            assert isinstance(output, torch.Tensor)
            return output

        sample = torch.linspace(0, tokens - 1, 64).long().to(device)
        exact = exact_rows(problem, sample)
        eager = baseline()[:, :, sample]
        for num_workers in _NUM_WORKERS:
            assert_tracks_exact(split(num_workers)[:, :, sample], eager, exact)

        ratios: dict[int, list[float]] = {w: [] for w in _NUM_WORKERS}
        seconds: dict[int, list[float]] = {w: [] for w in _NUM_WORKERS}
        for _ in range(repeats):
            for num_workers in _NUM_WORKERS:
                reference = _time(baseline, device)
                seconds[num_workers].append(_time(lambda: split(num_workers), device))  # noqa: B023
                ratios[num_workers].append(seconds[num_workers][-1] / reference)
        for num_workers in _NUM_WORKERS:
            rows.append(
                Measurement(
                    benchmark="split",
                    case=f"{kind}-{tokens}-h{heads}-d{head_dim}",
                    baseline="scaled_dot_product_attention",
                    num_workers=num_workers,
                    executor="local",
                    dtype=str(dtype).removeprefix("torch."),
                    ratio=statistics.median(ratios[num_workers]),
                    repeats=repeats,
                    **summarize(seconds[num_workers]),  # type: ignore[arg-type]
                )
            )
    append_rows(rows, out)
    header = ["case", "W", "median ms", "ratio to one call"]
    table = [[r.case, r.num_workers, f"{r.median_ms:.1f}", f"{r.ratio:.3f}"] for r in rows]
    print(f"{rows[0].device}, {rows[0].dtype}, torch {rows[0].torch_version}")
    print(format_table(header, table))


def _time(compute: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    compute()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
