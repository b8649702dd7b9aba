"""The Markdown file of results: a section per script, each replaced whole when its script has run."""
import os
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
    """One line: what the numbers below it were taken on, and what else ran there."""
    return (f"{date.today()}: {os.cpu_count()} cores, {environment(torch.get_num_threads())}, float32; load of the "
            f"machine before: {os.getloadavg()[0]:.1f}.")


def write_section(title: str, text: str, path: Path = RESULTS, head: str = HEAD) -> None:
    """Puts "## title" with this text into the file: in the place of the section of this title, or at the end."""
    sections = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    new = f"{title}\n\n{text.strip()}\n"
    titles = [section.split("\n")[0] for section in sections]
    if title in titles:
        sections[titles.index(title)] = new
    else:
        sections.append(new)
    with new_file(path) as partial:
        partial.write_text("\n## ".join([head, *sections]), encoding="utf-8")
