"""Write the results of images to a journal as they are computed, so that the same command resumes."""
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ..data.images import Batch, Images
from ..data.journal import Journal
from ..data.paths import count_images
from ..progress import progress_bar


def noted(part: Path, key: dict, images: Images, workers: int, make: Callable[[Batch], Iterable[dict]], what: str,
          others: Iterable[str] = ()) -> Iterator[tuple[Batch, Mapping[str, dict]]]:
    """Yield batches, each with all rows of the journal so far, by image.

    Args:
        part: the journal file.
        key: settings that a resumed run must share.
        make: computes the rows of the images in `batch.new`, with their names as "image". It is not called for images
            that are in the journal and have not changed since, nor for `others`.
        what: name of the progress bar.
    """
    since = part.stat().st_mtime_ns if part.exists() else 0
    changed = [str(path) for path in images.paths if path.exists() and path.stat().st_ctime_ns > since > 0]
    total = count_images(images.paths, images.limit)
    with Journal(part, key, id="image") as journal, progress_bar(total=total, what=what) as bar:
        stale = {name for name in journal.rows for path in changed if name == path or name.startswith(f"{path}::")}
        images.known = (journal.rows.keys() - stale).union(others)
        for batch in images.loader(workers):
            for row in make(batch) if batch.new else ():
                if row["image"] not in journal.rows or row["image"] in stale:
                    journal.append(row)
                    stale.discard(row["image"])
            yield batch, journal.rows
            bar.update(len(batch.names))
