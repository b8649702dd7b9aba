"""Rows about images in one file, by its suffix: JSON lines, CSV, or a parquet table.

In CSV what is no number and no text is JSON. A parquet table names images as tables of shards do (`tables.key_of`).
"""
import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.files import new_file

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 1024  # that are held at a time


def _in_cell(value: object) -> object:
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def _write_parquet(path: Path, rows: Iterable[dict], schema: "pa.Schema") -> None:
    from ..bulk.tables import key_of, write_table
    rows = iter(rows)
    with write_table(path, schema) as table:
        while some := list(islice(rows, ROWS)):
            table.add({name: [key_of(row[name]) if name == "image" else row[name] for row in some]
                       for name in schema.names})


def write_rows(out: str | Path, columns: list[str], rows: Iterable[dict], schema: "pa.Schema | None" = None) -> None:
    """Write {column: value} rows, whole or not at all. `schema` is of the columns of a parquet table."""
    suffix = Path(out).suffix.lower()
    with new_file(out) as partial:
        if suffix == ".parquet":
            return _write_parquet(partial, rows, schema)
        # Names of files are any bytes.
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            if suffix == ".csv":
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows({name: _in_cell(value) for name, value in row.items()} for row in rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
