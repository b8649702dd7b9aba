"""Write Markdown tables."""
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. None is an empty cell, and | in a cell is escaped."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"a table of {len(header)} columns has a row of {len(line)} cells: {line}")
    cells = ([("" if cell is None else str(cell)).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)
