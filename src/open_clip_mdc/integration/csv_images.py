"""Pairs of a table for training: the rows of OpenCLIP's CSV data set, read as the command-line tools read them."""
import logging
from functools import partial

from open_clip_train.data import CsvDataset
from torch import Tensor

from ..data.csv_pairs import image_path, read_table
from ..data.images import decode_image
from .data import worker_id
from .openclip import version

MOST_TRIED = 100  # rows in a row that may be damaged


class CsvImages(CsvDataset):
    """OpenCLIP's CSV data set, with rows and images read as the command-line tools do.

    A row whose image cannot be read is left out: the next one is read instead, so that batches keep their size.
    """

    def __init__(self, input_filename, transforms, img_key, caption_key, sep="\t", tokenizer=None, variable_text=False):
        rows = read_table(input_filename, img_key, caption_key, sep)
        self.lines, self.images, self.captions = map(list, zip(*rows, strict=True))
        self.table, self.left_out = input_filename, set()  # the latter of this data worker, by line
        self.transforms, self.tokenize = transforms, partial(tokenizer, pad=False) if variable_text else tokenizer

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        first, tries = None, min(MOST_TRIED, len(self.images))
        # The first place is as given: an index behind the last row ends an iteration.
        for place in (index, *(other % len(self.images) for other in range(index + 1, index + tries))):
            try:
                image = decode_image(image_path(self.images[place]))
                break
            except ValueError as problem:
                first = first or problem
                self.leave_out(self.lines[place], problem)
        else:
            raise ValueError(f"{first}. It is in {self.table}, line {self.lines[index]}, and none of {tries} rows from "
                             "there on has an image that can be read: check them")
        image, text = self.transforms(image), self.tokenize([self.captions[place]])[0]
        return {"image": image, "text": text} if version.DICT_BATCHES else (image, text)

    def leave_out(self, line: int, problem: ValueError) -> None:
        """Count a row that cannot be used, and log the first, the tenth, the hundredth and so on."""
        before = len(self.left_out)
        self.left_out.add(line)
        if len(self.left_out) > before and str(before + 1).rstrip("0") == "1":
            logging.warning("Left out %d of the rows of %s so far (data worker %d), and read the next instead. The "
                            "last is line %d: %s", before + 1, self.table, worker_id(), line, problem)


def csv_dataset(original):
    """Replace `open_clip_train.data.CsvDataset` by `CsvImages`."""
    return CsvImages
