"""The Markdown file of results: a section per script, each replaced whole when its script has run."""
import argparse
import os
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from open_clip_mdc.data.files import new_file
from open_clip_mdc.environment import environment

RESULTS = Path(__file__).parent / "RESULTS.md"
HEAD = """# Speed and memory on a CPU, as ratios

Written by `make bench`; no number is typed by hand. ViT-B/32 with random weights, which run at the speed of trained
ones. Sides take turns within a run; ratios are medians over the rounds. What a GPU does is in [GPU.md](GPU.md).
"""


def machine() -> str:
    return (f"{date.today()}: {os.cpu_count()} cores, {environment(torch.get_num_threads())}, float32; load of the "
            f"machine before: {os.getloadavg()[0]:.1f}.")


def section_parser(description: str, rounds: int = 5, model: bool = True,
                   captions: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if captions:
        parser.add_argument("--captions",
                            help="text file, a caption per line, or COCO captions json; rendered by default")
    if model:
        parser.add_argument("--size", default="ViT-B-32")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file whose section is replaced")
    return parser


def write_section(title: str, text: str, path: Path = RESULTS, head: str = HEAD) -> None:
    """Put "## title" with this text into the file: in the place of the section of this title, or at the end."""
    sections = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    new = f"{title}\n\n{text.strip()}\n"
    titles = [section.split("\n")[0] for section in sections]
    if title in titles:
        sections[titles.index(title)] = new
    else:
        sections.append(new)
    with new_file(path) as partial:
        partial.write_text("\n## ".join([head, *sections]), encoding="utf-8")


def write_report(title: str, report: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> None:
    """Write the section that a script's `report` makes of its flags, or exit with the problem in one line."""
    try:
        write_section(title, report(args), args.out)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
