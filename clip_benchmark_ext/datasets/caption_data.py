"""Read images with several captions each, for captioning and retrieval, with the ids that captions are saved under.

A webdataset has KEY.jpg and KEY.txt, with one caption per line, and its ids are the keys, which clip_benchmark would
drop. Other data sets have the ids "0", "1", ... in their order.

Dimensions: B images.
"""
from collections.abc import Callable, Sequence
from functools import partial

from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from open_clip_mdc.data.captions import text_of
from open_clip_mdc.data.paths import to_shards
from open_clip_mdc.data.text import unique


def read_sample(sample: dict, transform: Callable[[Image.Image], Tensor]) -> tuple[Tensor, list[str], str, str]:
    if "txt" not in sample:
        raise ValueError(f"{sample['__url__']}, sample {sample['__key__']}: this task needs an image and a .txt with "
                         "one caption per line")
    return transform(sample["jpg"]), text_of(sample).split("\n"), sample["__key__"], sample["__name__"]


def with_keys(dataset: Dataset, transform: Callable) -> Dataset:
    """Turn the samples of a webdataset into (image, captions, key, file name). Other data sets stay as they are."""
    if not hasattr(dataset, "pipeline"):
        return dataset
    dataset.pipeline = dataset.pipeline[:-3]  # clip_benchmark's last stages: decode, pick two members, transform
    return dataset.map(partial(read_sample, transform=transform))


def read_batch(number: int, batch: Sequence, dataloader: DataLoader) -> tuple[list[str], Tensor, list[list[str]]]:
    """Return ids, images [B, 3, H, W] and references of a batch. Raises ValueError if an image has no captions."""
    images, references, *keys = batch
    ids = list(keys[0]) if keys else [str(number * dataloader.batch_size + i) for i in range(len(images))]
    texts = []
    for i, captions in zip(ids, references, strict=True):
        if not isinstance(captions, (list, tuple)) or not any(str(caption).strip() for caption in captions):
            raise ValueError(f"image {i} has no captions to compare with: give another --task, or make a data set from "
                             f"images with captions by {to_shards('DIR', 'test')}")
        texts.append([text for caption in captions if (text := str(caption).strip())])
    return ids, images, texts


def unique_ids(ids: Sequence[str]) -> list[str]:  # shards may have the same keys
    seen = set()
    return [unique(i, place, seen) for place, i in enumerate(ids)]
