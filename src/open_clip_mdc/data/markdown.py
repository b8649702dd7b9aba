"""Write Markdown tables."""
from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table. None is an empty cell, and | in a cell is escaped.

    Raises ValueError for a row that has more or fewer cells than the header.
    """
    lines = []
    for row in (header, ["---"] * len(header), *rows):
        cells = ["" if cell is None else str(cell).replace("|", "\\|") for _, cell in zip(header, row, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
