"""Read images with a class for each pixel, for `--task segmentation`: CamVid, ADE20K, VOC 2012 and your own shards.

A mask has a class id per pixel, and VOID for pixels that do not count.

Dimensions: B images, H and W height and width of a mask.
"""
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from open_clip_mdc.data.images import decode_image
from open_clip_mdc.data.paths import inside
from open_clip_mdc.data.shards import image_member, read_samples
from open_clip_mdc.data.text import read_names

from .known import MASKED

VOID = 255
VOC = {"JPEGImages": ".jpg", "SegmentationClass": ".png"}  # folders of images and masks
Source = Path | bytes
Pairs = list[tuple[str, Source, Source]]  # name, image and mask


def _of_shard(root: Path, split: str) -> Pairs:
    """Return the pairs of SPLIT.tar, which has KEY.png and KEY.mask.png, or KEY.jpg and KEY.png."""
    pairs = []
    for sample in read_samples(str(root / f"{split}.tar")):
        # The name has no folder, so that a data set's fingerprint does not depend on its place.
        suffix, name = image_member(sample), f"{split}.tar, sample {sample['__key__']}"
        mask = sample.get("mask.png", sample.get("png") if suffix != "png" else None)
        if suffix is None or mask is None:
            raise ValueError(f"{root}, {name}: it needs an image and KEY.mask.png, or KEY.jpg and KEY.png")
        pairs.append((name, sample[suffix], mask))
    return pairs


def _of_ade20k(root: Path, split: str) -> Pairs:
    folder = {"train": "training", "val": "validation"}.get(split, split)
    return [(str(image), image, Path(root, "annotations", folder, f"{image.stem}.png"))
            for image in sorted(Path(root, "images", folder).iterdir()) if image.suffix == ".jpg"]


def _of_voc(root: Path, split: str) -> Pairs:
    listed = Path(root, "ImageSets", "Segmentation", f"{split}.txt")
    return [(name, *(inside(root / folder, f"{name}{suffix}", listed, name) for folder, suffix in VOC.items()))
            for name in read_names(listed)]


FORMS = {"shard": _of_shard, "ade20k": _of_ade20k, "voc": _of_voc}


@dataclass(eq=False, repr=False)
class MaskedImages(Dataset):
    split: str  # "val" if there is no test split
    pairs: Pairs
    classes: list[str]
    void: tuple[int, ...]  # ids of pixels that do not count, in the files
    first: int  # id of the first class, in the files
    transform: Callable[[Image.Image], Tensor]

    @property
    def place(self) -> str:
        return self.split

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        name, image, mask = self.pairs[index]
        image = decode_image(_opened(image), name)
        ids = read_mask(_opened(mask), name)
        if ids.shape != image.size[::-1]:
            raise ValueError(f"{name}: the image is {image.width} x {image.height} pixels and its mask "
                             f"{ids.shape[1]} x {ids.shape[0]}")
        void, ids = np.isin(ids, self.void), ids.astype(int) - self.first
        if (wrong := ids[~void & ((ids < 0) | (ids >= len(self.classes)))]).size:
            raise ValueError(f"{name}: its mask has the class {wrong[0] + self.first}, but there are "
                             f"{len(self.classes)} classes from {self.first} on")
        return self.transform(image), torch.from_numpy(np.where(void, VOID, ids).astype(np.uint8))

    @staticmethod
    def collate_fn(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, list[Tensor]]:
        images, masks = zip(*batch, strict=True)
        return torch.stack(images), list(masks)


def _opened(source: Source) -> Path | BytesIO:
    return BytesIO(source) if isinstance(source, bytes) else source


def read_mask(source: Path | BytesIO, name: str) -> np.ndarray:
    """Return the class ids, uint8 [H, W], of a palette or grey PNG."""
    try:
        with Image.open(source, formats=["PNG"]) as image:
            if image.mode not in ("P", "L"):
                raise ValueError(f"its mask has pixels of mode {image.mode}, not a class id each")
            return np.asarray(image)
    except Exception as problem:  # damaged files raise exceptions of any kind
        raise ValueError(f"{name}: {problem}") from problem


def build(name: str, root: str, split: str, transform: Callable[[Image.Image], Tensor]) -> MaskedImages:
    """Read a data set of MASKED, with val as the test split if there is none.

    Raises FileNotFoundError or ValueError.
    """
    row, folder = MASKED[name], Path(root)
    try:
        classes = row.get("classes") or read_names(folder / "classnames.txt")
        if split in ("test", "validation") and not (folder / f"{split}.tar").exists():
            split = "val"  # one name, by which the command sees that a split is used twice
        pairs = FORMS[row["form"]](folder, split)
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise FileNotFoundError(f"no {name} in {root} ({problem}): --dataset_root takes a folder with {row['layout']}"
                                ) from problem
    if not pairs:
        raise ValueError(f"{root} has no images of {name}'s {split}")
    return MaskedImages(split, pairs, classes, tuple(row.get("void", (VOID,))), row.get("first", 0), transform)
