"""The page of `open_clip_mdc caption`: how captions were decoded, and the other captions of --compare."""
import argparse
import os
from collections.abc import Mapping
from statistics import fmean

from ..data.files import parse_json
from ..data.text import read_lines
from ..decoding.rules import LENGTHS, SAMPLERS
from .page import shown


def checked(token: dict) -> dict:
    step, log_prob = token["step"], token["log_prob"]
    if not (step is log_prob is None or
            type(step) is int and 0 <= step < 10_000 and type(log_prob) in (int, float) and -1e6 < log_prob < 1):
        raise TypeError(f"{step!r} and {log_prob!r} are not a step and its log-probability")
    return {"token": "" + token["token"], "step": step, "log_prob": log_prob}


def read_captions(path: str, name: str | None = None) -> dict[str, dict]:
    """Return the rows of a file that this tool wrote, by the image's absolute path.

    Each row's "image" becomes `name` or else `path`.
    """
    try:
        rows = [parse_json(line) for line in read_lines(path)]
        return {os.path.abspath(row["image"]): {"image": name or path, "caption": "" + row["caption"],
                               "tokens": [checked(token) for token in row["tokens"]]} for row in rows}
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"--compare {path} is not a .jsonl file of open_clip_mdc caption: {problem!r}") from problem


def page_facts(args: argparse.Namespace, given: Mapping, causal: bool, clip_texts: list[int | None]) -> dict:
    """Return what a page says above its captions.

    `given` has the options of decoding that are not the default, `clip_texts` how many texts CLIP read for each image.
    """
    order = ("draws" if args.temperature else "searches by beam") + " from left to right" if causal else \
        SAMPLERS[args.sampler or "confidence"].help
    facts = {"Checkpoint": shown(args.pretrained, args.html), "Images": str(len(clip_texts)), "Order": order}
    for name, value in given.items():
        rule = f" ({LENGTHS[value].help})" if name == "length" and value in LENGTHS and not causal else ""
        facts[name.capitalize().replace("_", " ")] = f"{value}{rule}"
    if args.clip:
        name, _, weights = args.clip.partition(":")
        facts["Clip"] = f"{name}:{shown(weights, args.html)}, {fmean(clip_texts):.1f} texts per caption"
    if args.compare:
        facts["Compared with"] = shown(args.compare, args.html)
    return facts
