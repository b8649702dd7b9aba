"""Write the Markdown file of results. Each script has a section, which is replaced as a whole."""
import argparse
import os
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from textwrap import fill

import torch

from open_clip_mdc.data.files import new_file
from open_clip_mdc.environment import environment

RESULTS = Path(__file__).parent / "RESULTS.md"
HEAD = """# Speed and memory on a CPU, as ratios

`make bench` writes these sections, and no number is typed by hand. Models are ViT-B/32 with random weights, which are
as fast as trained ones. Sides take turns within a run, and ratios are medians over rounds. For a GPU see
[GPU.md](GPU.md).
"""


def machine() -> str:
    return (f"{date.today()}: {os.cpu_count()} cores, {environment(torch.get_num_threads())}, float32. Load of the "
            f"machine before: {os.getloadavg()[0]:.1f}.")


FLAGS = {"captions": dict(help="text file with a caption per line, or COCO captions JSON (default: made-up captions)"),
         "size": dict(default="ViT-B-32"), "rounds": dict(type=int, default=5),
         "batch-size": dict(type=int, default=16)}


def section_parser(description: str, *flags: str) -> argparse.ArgumentParser:
    """Return the parser of a script's flags, which are some of FLAGS, and --out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(f"--{flag}", **FLAGS[flag])
    parser.add_argument("--out", type=Path, default=RESULTS, help="Markdown file in which the section is replaced")
    return parser


def wrapped(line: str) -> str:
    return line if line.startswith("|") else fill(line, 120, subsequent_indent="  " * line.startswith("- "),
                                                  break_on_hyphens=False)


def write_section(title: str, text: str, path: Path, head: str = HEAD) -> None:
    """Write "## title" with this text into the file, in place of the section with this title or at the end."""
    old = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    sections = {section.split("\n")[0]: section for section in old}
    sections[title] = "\n".join([title, "", *map(wrapped, text.strip().splitlines()), ""])
    with new_file(path) as partial:
        partial.write_text("\n## ".join([head, *sections.values()]), encoding="utf-8")


def write_report(title: str, report: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> None:
    """Write the section that a script's `report` returns. Exits with one line if there is a problem."""
    try:
        write_section(title, report(args), args.out)
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
