"""List the compositionality data sets (SugarCrepe, ARO, Winoground, ...), each with its reader and its metric.

    dataset = build_dataset("sugar_crepe/swap_obj", root, transform)
    images, captions = dataset[0]     # [3, H, W] and C texts, the right one first
                                      # Winoground: [2, 3, H, W] and 2 texts, caption i belongs to image i
                                      # SugarCrepe++: 3 texts, the first two are right

Dimensions: B batch, C captions of a case, I images of a case, H and W the transform's size.
"""
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from clip_benchmark.datasets.builder import image_captions_collate_fn
from PIL import Image
from torch import Tensor, stack
from torch.utils.data import Dataset

from open_clip_mdc.data.images import decode_image
from open_clip_mdc.errors import close_names

from .datasets.known import SELECTION, selection_names, selection_row
from .datasets.local_files import Cell
from .datasets.readers import READERS, Case, Read
from .metrics import selection_metrics
from .metrics.selection_metrics import Metric


class Row(NamedTuple):
    read: Callable[..., Read]  # (name, root, perturbations=, tagger=)
    metric: Metric


def _row(name: str) -> Row:
    row = selection_row(name)
    return Row(READERS[row.get("reader", "read")], getattr(selection_metrics, row.get("metric", "PAIRS")))


PAIRS = selection_metrics.PAIRS
ROWS = {name: _row(name) for name in selection_names()}
FAMILIES = tuple(SELECTION)


def find_row(name: str) -> Row | None:
    """Return a data set's row, or None for other data sets. Any piece of VALSE has one, as it may be your own file."""
    family, _, part = name.partition("/")
    if name not in ROWS and family == "valse" and re.fullmatch(r"[\w-]+", part):
        return _row(name)
    if name not in ROWS and name.startswith(FAMILIES):
        own = [row for row in ROWS if row.partition("/")[0] == family]
        raise ValueError(f"unknown data set {name!r}{close_names(name, ROWS)}: give one of "
                         f"{', '.join(own or FAMILIES)}")
    return ROWS.get(name)


@dataclass(eq=False, repr=False)
class SelectionDataset(Dataset):
    name: str
    cases: list[Case]
    metric: Metric
    transform: Callable[[Image.Image], Tensor] | None = None
    facts: dict[str, int | str] = field(default_factory=dict)
    collate_fn = staticmethod(image_captions_collate_fn)  # [B, 3, H, W] or [B, I, 3, H, W], and B lists of C texts

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple[Tensor | Image.Image | list[Image.Image], list[str]]:
        case = self.cases[index]
        images = [decode_image(image.open(), image.name) if isinstance(image, Cell) else
                  decode_image(image, box=case.box) for image in case.images]
        if self.transform is not None:
            images = [self.transform(image) for image in images]
            images = images[0] if len(images) == 1 else stack(images)
        elif len(images) == 1:
            images = images[0]
        return images, list(case.captions)


def build_dataset(name: str, root: str | Path, transform: Callable[[Image.Image], Tensor] | None = None,
                  **options) -> SelectionDataset:
    """Read a data set of `ROWS` from its folder.

    Args:
        root: the folder, clip_benchmark's --dataset_root.
        transform: from an RGB image to [3, H, W]. None leaves images as they are.
        options: for ARO Order, `perturbations`, the file of frozen negatives (by default beside the captions), and
            `tagger`, which makes them.

    Raises ValueError, or FileNotFoundError that says what to download and the layout.
    """
    row = find_row(name)
    if row is None:
        raise ValueError(f"unknown data set {name!r}: give one of {', '.join(FAMILIES)}")
    cases, facts = row.read(name, Path(root), **options)
    return SelectionDataset(name, cases, row.metric, transform, facts)
