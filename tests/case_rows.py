"""Rows of the case study that nobody measured."""

from benchmarks.case_measurement import NUM_TASKS, TENSORS, TOKENS, CaseRow


def make_cases(tokens=TOKENS, workers=NUM_TASKS, memory=TENSORS, **options):
    """Return a row for each number: of time 1 / W, of memory 1 / sqrt(W)."""
    return [
        CaseRow(
            benchmark="memory",
            case="none",
            baseline="one worker",
            num_tasks=number,
            executor="local",
            dtype="float32",
            median_ms=length**2 / 1e6 / number,
            p20_ms=1.0,
            p80_ms=2.0,
            ratio=1.02 / number,
            repeats=1,
            **{
                "num_heads": 2,
                "num_kv_heads": 2,
                "head_dim": 8,
                "is_causal": False,
                "pattern": None,
                "seed": 0,
                **options,
            },
            tokens=length,
            tile=1,
            held_tokens=int(length * number**-0.5),
            interest_set=[0],
            whole_ms=length**2 / 1e6,
            predicted_bytes=int(length * number**-0.5 * 1000),
            peak_bytes=int(length * number**-0.5 * 1024),
            memory=memory,
            sample_seconds=[0.0, 1e-4, length**2 / 1e9 / number],
            sample_bytes=[0, int(length * number**-0.5 * 1024), 0],
        )
        for length in tokens
        for number in workers
    ]
