"""Note what is computed for images in a journal as it is done, so that the same command resumes."""
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ..data.images import Batch, Images
from ..data.journal import Journal
from ..data.paths import count_images
from ..progress import progress_bar


def noted(part: Path, key: dict, images: Images, workers: int, make: Callable[[Batch], Iterable[dict]], what: str,
          others: Iterable[str] = ()) -> Iterator[tuple[Batch, Mapping[str, dict]]]:
    """Yield batches, and the rows of the journal `part` by image: all that are known, those of the batch among them.

    `make(batch)` gives rows of the images in `batch.new`, with their names as "image". It is asked for images that the
    journal does not have, or that changed since, and not for `others`.
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
