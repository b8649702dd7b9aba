"""Long work on the batches of a data set: each process notes what it has done, and a later one does not do it again."""
import glob
import logging
from collections import ChainMap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from open_clip_mdc.data.journal import Journal, Rows

from .distributed import everywhere, merge, rank_and_size

Batch = TypeVar("Batch")


def journals(file: Path) -> list[Path]:
    return sorted(file.parent.glob(f"{glob.escape(file.name)}.part*"))


def resumed(batches: Iterable[tuple[int, Batch]], file: Path, key: dict, make: Callable[[int, Batch], dict],
            fits: Callable[[dict, Batch], bool] = lambda row, batch: True) -> list[dict]:
    """Return on every process what `make(number, batch)` gives for the batches of all, in their order.

    Each process notes its own in the journal FILE.partN. What any process noted before under the same key is taken from
    there if it `fits` the batch. The caller removes the `journals` once the whole is safe.
    """
    done = ChainMap(*(Rows(part, key, "batch") for part in journals(file)))
    everywhere(True)  # have read: an empty journal of this run goes again while others look for earlier ones
    if done and rank_and_size()[0] == 0:
        logging.warning("what was stopped resumes: %d batches are done", len(done))
    rows = []
    with Journal(file.with_name(f"{file.name}.part{rank_and_size()[0]}"), key, "batch") as journal:
        for i, batch in batches:
            row = done.get(i)
            if row is None or not fits(row, batch):
                row = {"batch": i, **make(i, batch)}
                journal.append(row)
            rows.append((i, row))
    return merge(rows)
