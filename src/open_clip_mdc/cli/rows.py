"""Write rows about images to one file, by its suffix as JSON lines, CSV or a Parquet table.

CSV holds lists and objects as JSON, and no text that a spreadsheet takes for a formula: an image =1.png is written as
./=1.png, which is the same file, and other text gets an apostrophe in front. A Parquet table names images by the same
rule as tables of shards (`tables.key_of`).
"""
import csv
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from ..data.files import new_file

ROWS = 1024  # in memory at a time
FORMULAS = tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")  # how they begin in a spreadsheet, in full width, too


def _in_cell(column: str, value: object) -> object:
    if isinstance(value, str) and value.startswith(FORMULAS):
        return ("./" if column == "image" else "'") + value
    return json.dumps(value) if isinstance(value, (list, dict)) else value


def write_rows(out: str | Path, columns: Sequence[str], rows: Iterable[dict], schema: Callable | None = None) -> None:
    """Write the `columns` of rows {column: value}, all or nothing. `schema` makes that of a Parquet table."""
    suffix = Path(out).suffix.lower()
    rows = ({name: row[name] for name in columns if name in row} for row in rows)
    with new_file(out) as partial:
        if suffix == ".parquet":
            from ..bulk.tables import key_of, write_table
            with write_table(partial, schema()) as table:
                while some := list(islice(rows, ROWS)):
                    table.add({name: [key_of(row[name]) if name == "image" else row[name] for row in some]
                               for name in columns})
            return
        # File names may be any bytes.
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            if suffix == ".csv":
                writer = csv.DictWriter(file, columns)
                writer.writeheader()
                writer.writerows({name: _in_cell(name, value) for name, value in row.items()} for row in rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in rows)
