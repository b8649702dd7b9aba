"""Resume long work on the batches of a data set: each process writes finished batches to a journal."""
import glob
import logging
from collections import ChainMap
from collections.abc import Callable, Iterable
from pathlib import Path

from open_clip_mdc.data.journal import Journal

from .distributed import everywhere, is_first, merge, rank_and_size


def journals(file: Path) -> list[Path]:
    return sorted(file.parent.glob(f"{glob.escape(file.name)}.part*"))


def resumed(batches: Iterable[tuple[int, object]], file: Path, key: dict, make: Callable[[int, object], dict],
            fits: Callable[[dict, object], bool] = lambda row, batch: True) -> list[dict]:
    """Return the rows of `make(number, batch)` for the batches of all processes, in order, on every process.

    Each process writes its rows to the journal FILE.partN. Rows that any process wrote earlier under the same key are
    reused if they `fits` the batch. The caller removes the `journals` once the result is saved.
    """
    done = ChainMap(*(Journal(part, key, "batch").read() for part in journals(file)))
    everywhere(True)  # wait until all have read, as an empty journal of this run is removed again
    if done and is_first():
        logging.warning("resuming an interrupted run: %d batches are done", len(done))
    rows = []
    with Journal(file.with_name(f"{file.name}.part{rank_and_size()[0]}"), key, "batch") as journal:
        for i, batch in batches:
            row = done.get(i)
            if row is None or not fits(row, batch):
                row = {"batch": i, **make(i, batch)}
                journal.note(row)
            rows.append((i, row))
    return merge(rows)
