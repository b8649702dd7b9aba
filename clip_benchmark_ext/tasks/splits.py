"""Encode the images of a data set's splits, to train a probe, choose its settings and test it."""
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.data.fingerprint import fingerprint

from .. import token_cache
from ..evaluation_job import Job
from ..features import cache_key
from ..token_cache import Encode, TokenCache

HELD_OUT = 0.1  # share of the training images, if there is no validation split


class Splits(NamedTuple):
    """Encoded images by use."""

    learn: TokenCache  # training and validation images
    train: Tensor  # row numbers of training images in `learn`
    val: Tensor  # row numbers of validation images in `learn`
    test: TokenCache


def load_splits(job: Job, batches: DataLoader, encode: Encode, kind: str) -> Splits:
    """Return the splits, after encoding by `encode` what is not cached. `kind` names the features in the cache key."""
    args, loaders = job.args, job.load_splits(batches)
    share = HELD_OUT if args.val_proportion is None else args.val_proportion
    if args.fewshot_epochs < 1 or not 0 < share < 1:
        raise ValueError(f"--fewshot_epochs {args.fewshot_epochs}, --val_proportion {share}: give at least 1 epoch, "
                         "and a share between 0 and 1")
    towers = "".join(map(fingerprint, (job.model.trained, job.model.untrained)))
    caches = {}
    for split, loader in loaders.items():
        key = cache_key(towers, loader, split, kind, False, args) | {"batch_size": args.batch_size}
        caches[split] = token_cache.load(key, loader, encode, args)
    count = len(caches["train"])
    if "val" in caches:
        learn = TokenCache([*caches["train"].files, *caches["val"].files])
        return Splits(learn, torch.arange(count), torch.arange(count, len(learn)), caches["test"])
    held_out = max(round(count * share), 1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(args.seed))
    if held_out >= count:
        raise ValueError(f"{held_out} of {count} training images would be held out: give more images, or another "
                         "--val_proportion")
    return Splits(caches["train"], order[held_out:], order[:held_out], caches["test"])
