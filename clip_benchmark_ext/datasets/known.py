"""The data sets that are known by name: rows of datasets.json, and of the file of --datasets.

"selection" has right and wrong captions, "captions" only right ones, and "classes" one or more labels of each image
(readers.py). "masked" has a class for each pixel (masks.py), and "foreign" names what clip_benchmark reads itself
(foreign_datasets.py). docs/extend.md lists the fields. A row of a family counts for all its subsets, whose own fields
come first. Texts may name other fields in braces, and {split}.
"""
import json
import re
from collections import ChainMap
from pathlib import Path

from open_clip_mdc.errors import close_names

PACKAGE = Path(__file__).parents[1]
KINDS = {kind: ChainMap({}, rows)  # the first map is for the rows of --datasets
         for kind, rows in json.loads((PACKAGE / "datasets.json").read_bytes()).items()}
MASKED, FOREIGN = KINDS["masked"], KINDS["foreign"]
TYPES = {"text": str, "number": int, "object": dict, "list of texts": list, "list of numbers": list,
         "text or list": (str, list)}
ITEMS = {"list of texts": str, "list of numbers": int, "text or list": (str, list)}
OTHERS = ("NAME of clip_benchmark (cifar10), wds/NAME, vtab/NAME, tfds/NAME", "folder (DIR/train/CLASS/*, "
          "DIR/test/CLASS/* by --dataset_root DIR)")


def names(*kinds: str) -> list[str]:
    return [f"{family}/{subset}".rstrip("/") for kind in kinds for family, row in KINDS[kind].items()
            for subset in row.get("subsets", [""])]


def kind_of(name: str) -> str | None:
    """Return the kind of a data set, or None if no row has its name or that of its family."""
    return next((kind for kind, rows in KINDS.items() if name in rows or name.partition("/")[0] in rows), None)


def row_of(name: str, split: str = "test") -> dict:
    """Return the row of a data set of captions or classes, with its texts filled in.

    `subset` is behind its /, and `group` its name in the family. Any piece of VALSE has a row, as it may be your own
    file. Raises ValueError for a name without one.
    """
    known, (family, _, subset) = names("selection", "captions", "classes"), name.partition("/")
    if name not in known and not (family == "valse" and re.fullmatch(r"[\w-]+", subset)):
        own = [one for one in known if one.partition("/")[0] == family]
        families = dict.fromkeys(one.partition("/")[0] for one in (*known, *MASKED))
        raise ValueError(f"unknown data set {name!r}{close_names(name, (*known, *MASKED, *FOREIGN))}: give one of "
                         f"{', '.join(own or (*families, *OTHERS))}")
    row = {"folders": [""], "images": [], **KINDS[kind_of(name)][family], "subset": subset, "group": subset or family,
           "split": split}
    row |= row.pop("subsets", {}).get(subset, {})

    def filled(value: object) -> object:
        if isinstance(value, list):
            return [filled(one) for one in value]
        for field, text in row.items() if isinstance(value, str) else ():
            value = value.replace(f"{{{field}}}", str(text))
        return value

    return {field: filled(value) for field, value in row.items()}


def check(value: object, kind: str | list | dict, where: str) -> None:
    """Raise ValueError unless a value is of a kind: a type by name, one of the texts of a list, or an object's fields.

    In an object the field "" lists what it needs.
    """
    if isinstance(kind, list) and value not in kind:
        raise ValueError(f"{where} is {value!r}{close_names(str(value), kind)}: give one of {', '.join(kind)}")
    if isinstance(kind, str) and not (isinstance(value, TYPES[kind]) and (
            kind not in ITEMS or all(isinstance(one, ITEMS[kind]) for one in value))):
        raise ValueError(f"{where} is {value!r}: it should be a {kind}")
    if isinstance(kind, dict):
        check(value, "object", where)
        fields = {field: one for field, one in kind.items() if field}
        for field, one in value.items():
            check(field, list(fields), f"{where}: a field")
            check(one, fields[field], f"{where}, {field}")
        if lacking := [field for field in kind.get("", ()) if field not in value]:
            raise ValueError(f"{where} lacks {lacking[0]!r}")


def use(file: str) -> None:
    """Know the data sets of a file, too, which has the form of datasets.json.

    Raises ValueError that names the file, the row and the field that is wrong, or OSError.
    """
    from .local_files import read_json
    own, fields = read_json(Path(file), "dict"), read_json(PACKAGE / "dataset_fields.json", "dict")
    check(own, dict.fromkeys(fields, "object"), file)
    for kind, rows in own.items():
        for name, row in rows.items():
            where = f"{file}, {kind}, {name}"
            if "/" in name or any(name in known.maps[1] for known in KINDS.values()):
                raise ValueError(f"{where}: the name has a slash, or is that of another data set: give another")
            check(row, "object", where)
            check(row.get("subsets", {}), "object", f"{where}, subsets")
            for subset, more in row.get("subsets", {"": {}}).items():
                place = f"{where}/{subset}".rstrip("/")
                check(more, "object", place)
                check({**row, **more}, fields[kind], place)
    for kind, rows in KINDS.items():
        rows.maps[0] = own.get(kind, {})
