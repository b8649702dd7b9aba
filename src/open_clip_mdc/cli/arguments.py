"""The flags of each tool, from the table flags.json. Imports no torch: `--help` is quick.

A row has the arguments of `add_argument`, with a type by its name in TYPES, and `named` for an output's default name.
Other rows begin a "group" (null is the tool itself), stand for "rows" that tools share or for flags of "decoding", or
have the "commands" of a tool.
"""
import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from ..data.outputs import Default
from ..errors import close_names, flag, number_from
from ..integration import decoding_flags as decoding

TABLES = json.loads(Path(__file__).with_name("flags.json").read_bytes())
FETCHED = TABLES["fetch"][0]["choices"] = tuple(json.loads(Path(__file__).with_name("fetch.json").read_bytes()))
DECODING = {"length": ["length"], "clip": decoding.OF_CLIP,
            "rest": [name for name in decoding.OPTIONS if name not in ("length", "num_beams", *decoding.OF_CLIP)]}
SHARDS = "webdataset shards, such as 'DIR/{00000..00009}.tar'"


def objects(value: str) -> tuple[int | None, int]:
    fewest, dash, most = value.rpartition("-")
    return int(fewest) if dash else None, int(most)


def kind(value: str) -> str:
    kinds = TABLES["list"][0]["default"]
    if value not in kinds:
        raise argparse.ArgumentTypeError(f"{value!r} is none of {', '.join(kinds)}{close_names(value, kinds)}")
    return value


def share(value: str) -> float:
    if not 0 < float(value) <= 1:
        raise argparse.ArgumentTypeError(f"{value} should be more than 0 and at most 1")
    return float(value)


TYPES = decoding.TYPES | {"objects": objects, "kind": kind, "share": share, "up to 65535": number_from(1, 65_535),
                          "jobs": number_from(1, 1000), "workers": number_from(0, 1000)}


def add(parser: argparse.ArgumentParser, *tables: str) -> None:
    """Add the flags of tables by name."""
    add_rows(parser, [{"rows": table} for table in tables], parser)


def add_rows(parser: argparse.ArgumentParser, rows: Iterable[dict], group: argparse._ActionsContainer):
    """Add rows to a parser, the first ones to a group of it. Returns the group of the last one."""
    for row in rows:
        match row:
            case {"group": title}:
                group = parser.add_argument_group(title) if title else parser
            case {"rows": table}:
                group = add_rows(parser, TABLES[table], group)
            case {"decoding": names}:
                decoding.add_flags(group, DECODING[names], flag)
                parser.set_defaults(**{name: decoding.DEFAULTS.get(name) for name in DECODING[names]})
            case {"commands": dest, "of": commands}:
                below = parser.add_subparsers(dest=dest, required=True)
                for name, about in commands.items():
                    command = below.add_parser(name, aliases=about.get("aliases", ()), help=about["help"])
                    add_rows(command, about["rows"], command)
            case {"defaults": values}:
                parser.set_defaults(**values)
            case {"named": name, **rest}:
                decoding.add_row(group, rest | {"default": Default(name)}, TYPES)
            case _:
                decoding.add_row(group, row, TYPES)
    return group
