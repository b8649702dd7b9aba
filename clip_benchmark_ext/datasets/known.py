"""The data sets that are known by name: rows of datasets.json.

"selection" has our own data sets of right and wrong captions (readers.py), "masked" those with a class for each pixel
(masks.py), and "foreign" those of clip_benchmark (foreign_datasets.py). A row of a family counts for all its subsets.
Their own fields come first. Texts may name other fields in braces.
"""
import json
from pathlib import Path

_TABLE = json.loads((Path(__file__).parents[1] / "datasets.json").read_text(encoding="utf-8"))
SELECTION, MASKED, FOREIGN = (_TABLE[kind] for kind in ("selection", "masked", "foreign"))


def selection_names() -> list[str]:
    return [f"{family}/{subset}".rstrip("/") for family, row in SELECTION.items()
            for subset in row.get("subsets", [""])]


def selection_row(name: str) -> dict:
    """Return the row of a data set, with its texts filled in, and `subset` and `group`, its name in the family."""
    family, _, subset = name.partition("/")
    row = {**SELECTION[family], "subset": subset, "group": subset or family}
    row |= row.pop("subsets", {}).get(subset, {})

    def filled(value: object) -> object:
        if isinstance(value, str):
            return value.format(**row)
        return [one.format(**row) for one in value] if isinstance(value, list) else value

    return {field: filled(value) for field, value in row.items()}
