"""Read data sets of captions (SugarCrepe, ARO, Winoground, DOCCI, ...) or classes, by their rows in datasets.json.

    dataset = build_dataset("sugar_crepe/swap_obj", root, transform)
    images, captions = dataset[0]     # [3, H, W] and C texts, the right one first
                                      # Winoground: [2, 3, H, W] and 2 texts, caption i belongs to image i
                                      # SugarCrepe++: 3 texts, the first two are right
                                      # DOCCI: 1 text, which is right
    image, target = build_dataset("voc2007_official", root, transform)[0]     # [3, H, W] and [K]

Dimensions: B batch, C captions of a case, I images of a case, K classes, H and W the transform's size.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from .datasets.known import kind_of, row_of
from .datasets.readers import READERS, Case, Read
from .metrics import selection_metrics
from .metrics.classes import UNSURE
from .metrics.selection_metrics import Metric


class Row(NamedTuple):
    read: Callable[..., Read]  # (name, root, split=, tagger=)
    metric: Metric


PAIRS = selection_metrics.PAIRS
Transform = Callable[[Image.Image], Tensor] | None  # to [3, H, W]. None leaves images as they are
ROWS: dict[str, Row] = {}  # data sets of plug-ins


def find_row(name: str) -> Row:
    """Return the reader and the metric of a data set. Raises ValueError if none is known by this name."""
    if name in ROWS:
        return ROWS[name]
    row = row_of(name)
    return Row(READERS[row.get("reader", "read")], getattr(selection_metrics, row.get("metric", "PAIRS")))


@dataclass(eq=False, repr=False)
class SelectionDataset(Dataset):
    name: str
    cases: list[Case]
    metric: Metric
    transform: Transform
    facts: dict[str, int | str]

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> tuple:
        images, captions = self.cases[index].opened(), list(self.cases[index].captions)
        if self.transform:
            images = [self.transform(image) for image in images]
        if len(images) == 1:
            return images[0], captions
        return torch.stack(images) if self.transform else images, captions

    @staticmethod
    def collate_fn(batch: list[tuple]) -> tuple:
        """Return [B, 3, H, W] or [B, I, 3, H, W], B lists of C texts, and what else the samples have."""
        images, *rest = zip(*batch, strict=True)
        return torch.stack(images), *rest


class KeyedDataset(SelectionDataset):
    """Images with captions, the key of the case and the name of the image."""

    def __getitem__(self, index: int) -> tuple:
        case = self.cases[index]
        return *super().__getitem__(index), case.key, case.images[0].name


@dataclass(eq=False, repr=False)
class ClassDataset(SelectionDataset):
    """Images with a class id, or with 1, 0 or UNSURE for each class if an image may have several of them."""

    classes: Sequence[str]
    templates: Sequence[str]
    several: bool
    collate_fn = staticmethod(default_collate)

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes)}

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        image, labels = super().__getitem__(index)
        if not self.several:
            return image, self.classes.index(labels[0])
        target = torch.zeros(len(self.classes))
        for place, label in enumerate(labels):
            target[self.classes.index(label)] = 1 if place < self.cases[index].right else UNSURE
        return image, target


def build_dataset(name: str, root: str | Path, transform: Transform = None,
                  split: str = "test", keyed: bool = False, templates: Sequence[str] = (),
                  **options) -> SelectionDataset:
    """Read a data set of captions or classes from its folder.

    Args:
        root: the folder, clip_benchmark's --dataset_root.
        transform: from an RGB image to [3, H, W]. None leaves images as they are.
        keyed: return the key and the name of the image with each image, too.
        templates: those of a data set of classes whose row has none.
        options: for ARO Order, `tagger`, which makes the file of negatives.

    Raises ValueError, or FileNotFoundError that says what to download and the layout.
    """
    reader = find_row(name)
    cases, facts = reader.read(name, Path(root), split=split, **options)
    parts, kind = (name, cases, reader.metric, transform, facts), kind_of(name)
    if kind == "selection" and not reader.metric.statements and (lacking := [
            case.key for case in cases if not 0 < case.right < len(case.captions)]):
        raise ValueError(f"{name}, row {lacking[0]}: it should have a right caption and a wrong one")
    if kind != "classes":
        return KeyedDataset(*parts) if keyed else SelectionDataset(*parts)
    row, found = row_of(name, split), {label for case in cases for label in case.captions}
    classes = row.get("classes") or sorted(found)
    if unknown := sorted(found - set(classes)):
        raise ValueError(f"{name}: {unknown[0]!r} is none of the {len(classes)} classes of its row")
    return ClassDataset(*parts, classes, row.get("templates") or templates,
                        several=isinstance(row["columns"]["labels"], str))
