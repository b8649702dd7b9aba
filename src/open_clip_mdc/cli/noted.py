"""Write the results of images to a journal as they are computed, so that the same command resumes."""
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ..data.files import file_state, sha256
from ..data.images import Batch, Images
from ..data.journal import Journal
from ..data.paths import is_shard
from ..data.shards import count_images
from ..progress import progress_bar


class Files:
    """The files of images, and what a row of a journal says of the one that it was made of (`made_of`)."""

    def __init__(self, paths: list[Path]):
        # Taken before the images are read: a file that changes meanwhile does not pass for what was read.
        self.states = {str(path): list(file_state(path)) for path in paths if path.exists()}

    def of(self, image: str) -> str:
        """Return the file of an image: its path, or that of its shard (shard::key). "" if there is none."""
        while image not in self.states and image:
            image = image.rpartition("::")[0]
        return image

    def made_of(self, image: str) -> dict | None:
        """Return state and SHA-256 of an image's file, of a shard only the state. None if it changed or went since."""
        if not (file := self.of(image)):
            return None
        try:
            content = None if is_shard(file) else sha256(file)
            same = list(file_state(file)) == self.states[file]  # after the content was read
        except FileNotFoundError:
            return None
        return {"state": self.states[file], "sha256": content} if same else None

    def fits(self, row: dict) -> bool:
        """Return whether a row is of the file that is there. A file that was copied or moved is read again to tell."""
        file, old = self.of(row["image"]), row.get("of")
        if not file or not old:
            return False
        return old["state"] == self.states[file] or old["sha256"] is not None and old["sha256"] == sha256(file)


def noted(part: Path, key: dict, images: Images, workers: int, make: Callable[[Batch], Iterable[dict]], what: str,
          others: Iterable[str] = (),
          fits: Callable[[dict], bool] = lambda row: True) -> Iterator[tuple[Batch, Mapping[str, dict]]]:
    """Yield batches, each with all rows of the journal so far, by image. "of" in a row says which file it is of.

    Args:
        part: the journal file.
        key: settings that a resumed run must share.
        make: computes the rows of the images in `batch.new`, with their names as "image". It is not called for images
            that are in the journal with the same content, nor for `others`.
        what: name of the progress bar.
        fits: returns whether a row of the journal holds all that this run needs of it.
    """
    files = Files(images.paths)
    total = count_images(images.paths, images.limit)
    with Journal(part, key, id="image") as journal, progress_bar(total=total, what=what) as bar:
        known = {name for name, row in journal.items() if files.fits(row) and fits(row)}
        images.known = known.union(others)
        for batch in images.loader(workers):
            for row in make(batch) if batch.new else ():
                if row["image"] not in known:
                    journal.note({**row, "of": files.made_of(row["image"])})
                    known.add(row["image"])
            yield batch, journal
            bar.update(len(batch.names))
