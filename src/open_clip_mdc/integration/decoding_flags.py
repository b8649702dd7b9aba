"""Flags of decoding for `open_clip_mdc caption` and `clip_benchmark eval`. Imports no torch.

decoding_flags.json has the options of `Unmasking`, `Search` and `Sampling`, and those of a CLIP model, in the order of
result files: the arguments of `add_argument`, a type by its name in TYPES, and rules by the name of their table.
"""
import json
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ..decoding.options import OF_SEARCH, OF_UNMASKING, REPEATS, SELECT, UNCOND
from ..decoding.rules import LENGTHS, SAMPLERS
from ..errors import finite, number_from

OF_CLIP = ("clip", "clip_scale", "clip_rerank")
DEFAULTS = {"temperature": 0.0, "guidance_scale": 1.0, "clip_scale": 0.0, "clip_rerank": 1, "samples": 1, "seed": 0}
# A sampler has none, as a plug-in may add one after the flags are read.
CHOICES = {"repeats": REPEATS, "select": SELECT, "uncond": UNCOND}


def caption_length(value: str) -> int | str:
    """Parse a number of tokens, or the name of a rule."""
    if value in LENGTHS:
        return value
    if value.lstrip("+-").isdecimal():
        return number_from(1)(value)
    raise ArgumentTypeError(f"{value} is now top" if value == "likely" else
                            f"{value!r} is neither a number of tokens nor {', '.join(LENGTHS)}")


def tokens_per_step(value: str) -> int | float:
    """Parse a number of tokens such as 2, or a probability such as 0.9."""
    return float(value) if "." in value else int(value)


TYPES = {"length": caption_length, "tokens": tokens_per_step, "positive": number_from(1), "natural": number_from(0),
         "finite": finite, "int": int, "float": float, "str": str, "bool": bool}
OPTIONS = {row.pop("option"): row for row in json.loads(Path(__file__).with_suffix(".json").read_bytes())}


def add_row(parser, row: Mapping, types: Mapping[str, Callable] = TYPES) -> None:
    """Add a flag to an argparse parser or group: its name or names, and the arguments of `add_argument`.

    The type is one of `types` by its name.
    """
    given = {**row, "type": types[row["type"]]} if "type" in row else dict(row)
    parser.add_argument(*given.pop("flag").split(), **given)


def add_flags(parser, names: Iterable[str], spell: Callable[[str], str]) -> None:
    """Add flags of decoding to an argparse parser or group. `spell` turns the name of an option into the flag."""
    for name in names:
        row = {"choices": CHOICES.get(name), **OPTIONS[name]}
        for table, rules in (("LENGTHS", LENGTHS), ("SAMPLERS", SAMPLERS)):
            row["metavar"] = (row.get("metavar") or "").replace(table, "|".join(rules)) or None
            row["help"] = row["help"].replace(table, ", ".join(f"{key} ({rule.help})" for key, rule in rules.items()))
        kind = "masked diffusion: " * (name in OF_UNMASKING) + "autoregressive: " * (name in OF_SEARCH)
        add_row(parser, row | {"flag": spell(name), "help": kind + row["help"]})
