"""Rows of a benchmark, printed as a table and appended to a file."""

from collections.abc import Callable, Mapping, Sequence

from cqs.report.measurement import RowKind, append_rows, format_rows


def publish(
    rows: Sequence[RowKind],
    columns: Mapping[str, Callable[[RowKind], object]],
    out: str | None,
) -> None:
    """Print a table, and append the rows to a file of one JSON object per line.

    Args:
        rows: At least one.
        columns: Header of a column and what it shows of a row.
        out: The file, which is never overwritten, or ``None``.
    """
    append_rows(rows, out)
    print(f"{rows[0].device}, {rows[0].dtype}, torch {rows[0].torch_version}")
    print(format_rows(rows, columns))
