"""Encoded images of a data set's splits: a probe learns from one, chooses by another and is measured on a third."""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.models.fingerprint import fingerprint

from .. import token_cache
from ..features import cache_key
from ..job import Job
from ..other_sets import check_classes
from ..token_cache import Encode, TokenCache

HELD_OUT = 0.1  # of the training images, where no validation split is given


class Splits(NamedTuple):
    """Images to learn from, validation images included, the row numbers of both, and images to measure on."""

    learn: TokenCache
    train: Tensor
    val: Tensor
    test: TokenCache


def load_splits(job: Job, batches: DataLoader, encode: Encode, kind: str) -> Splits:
    """Encode what no earlier run has encoded, by `encode`, which gives `kind` of features."""
    args, loaders = job.args, {"train": job.load(job.args.train_split)}
    if args.val_split is not None:
        loaders["val"] = job.load(args.val_split)
    loaders["test"] = batches
    check_classes({split: loader.dataset for split, loader in loaders.items()})
    towers = "".join(map(fingerprint, (job.model.trained, job.model.untrained)))
    caches = {}
    for split, loader in loaders.items():
        key = cache_key(towers, loader, split, kind, False, args.device, args.amp) | {"batch_size": args.batch_size}
        caches[split] = token_cache.load(args.feature_root, key, loader, encode, args.device, args.amp,
                                         f"{split} tokens")
    count = len(caches["train"])
    if "val" in caches:
        learn = TokenCache([*caches["train"].files, *caches["val"].files])
        return Splits(learn, torch.arange(count), torch.arange(count, len(learn)), caches["test"])
    held_out = max(round(count * (HELD_OUT if args.val_proportion is None else args.val_proportion)), 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(args.seed))
    if held_out >= count:
        raise ValueError(f"{count} training images, of which {held_out} are held out: give more, or another "
                         "--val_proportion")
    return Splits(caches["train"], order[held_out:], order[:held_out], caches["test"])
