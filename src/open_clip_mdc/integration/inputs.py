"""Read images and captions that are given in Python: files, folders, PIL images, arrays, tensors, lists of these.

Dimensions: B images, H and W pixels.
"""
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from ..data.paths import find_images, is_shard

# A file or folder, a PIL image, pixels (uint8 [H, W] or [H, W, 3]), or what the model's transform returns, [3, H, W].
AnyImage = str | Path | Image.Image | np.ndarray | Tensor
Captions = str | Sequence[str] | Sequence[Sequence[str]]  # one, or several, for all images, or several for each
Images = AnyImage | Iterable[AnyImage]  # also an array [B, H, W, 3] or a tensor [B, 3, H, W]


def pixels_of(array: np.ndarray) -> list[Image.Image]:
    """Return the images of an array, uint8 [H, W], [H, W, 3] or [B, H, W, 3]. There may also be 1 or 4 channels."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim not in (3, 4) or array.shape[-1] not in (1, 3, 4) or array.dtype != np.uint8:
        raise ValueError(f"an array {list(array.shape)} of {array.dtype} is no image: give pixels from 0 to 255 as "
                         "uint8, [H, W], [H, W, 3] or [B, H, W, 3], with the channels last")
    array = array[None] if array.ndim == 3 else array
    return [Image.fromarray(np.ascontiguousarray(x[..., 0] if x.shape[-1] == 1 else x)) for x in array]


def files_of(name: str) -> list[Path]:
    """Return the images that a path or pattern stands for. Raises ValueError for a URL or a shard."""
    if "://" in name or is_shard(name) or not name:
        raise ValueError(f"{name!r} is no image: download what a URL names, and read a shard by open_clip_mdc caption, "
                         "embed or score")
    return find_images([name])


def as_list(images: Images, nested: bool = False) -> list[Path | Image.Image | Tensor]:
    """Return a list of files, images and tensors. `nested` marks an item of a list, which may not be a list again."""
    if isinstance(images, Image.Image):
        return [images]
    if isinstance(images, (str, os.PathLike)):
        return files_of(os.fspath(images))
    if isinstance(images, np.ndarray) and images.dtype.kind not in "OU":
        found = pixels_of(images)
    elif isinstance(images, Tensor):
        if images.ndim not in (3, 4):
            raise ValueError(f"a tensor {list(images.shape)} is no image: give what the model's transform makes, "
                             "[3, H, W], or a batch of these, [B, 3, H, W]")
        found = list(images if images.ndim == 4 else images[None])
    elif nested or isinstance(images, (bytes, bytearray, Mapping)) or not isinstance(images, Iterable):
        raise TypeError(f"{str(images)[:40]!r} ({type(images).__name__}) is no image: give a file, a folder, a PIL "
                        "image, a uint8 array [H, W, 3], what the model's transform makes of one, or a list of these")
    else:
        found = [one for image in images for one in as_list(image, nested=True)]
    if not found:
        raise ValueError("there are no images")
    return found


def as_captions(captions: Captions) -> list[list[str]]:
    """Return a list of captions for each image, or one list for all images. All have the same length."""
    try:
        each = [captions] if isinstance(captions, (str, Mapping)) else list(captions)
        each = [each] if any(isinstance(one, (str, Mapping)) for one in each) else list(map(list, each))
    except TypeError:  # what cannot be iterated
        each = [[captions]]
    for one in each:
        for caption in one:
            if not isinstance(caption, str):
                raise TypeError(f"{str(caption)[:40]!r} ({type(caption).__name__}) is no caption: captions is a text, "
                                "a list of texts, or such a list for each image")
    lengths = sorted(map(len, each))
    if not lengths or not lengths[0]:
        raise ValueError("there are no captions")
    if lengths[0] < lengths[-1]:
        raise ValueError(f"all images need the same number of captions, but one has {lengths[0]} and another "
                         f"{lengths[-1]}")
    return each
