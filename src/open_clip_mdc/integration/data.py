"""Reproducible data loading on top of OpenCLIP's pipeline, with a batch prefetched to the device, for CLIP models too.

All random numbers are a function of --seed, epoch, rank and worker. OpenCLIP seeds a process once, and its webdataset
shuffle by process id and clock. So no two of its runs are equal, and a resumed run repeats the noise of its first
epoch. Here `seed_noise` seeds each epoch in the training process, and `SeedEachPass` where samples are read.

Images are transferred as uint8 from pinned memory, one batch ahead, and normalised on the device.

Dimensions: B images, H and W pixels.
"""
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from open_clip_train.data import DataInfo, ResampledShards2, SharedEpoch
from open_clip_train.distributed import world_info_from_env
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info
from webdataset.filters import _shuffle

from ..data.captions import CAPTION_SEPARATOR
from ..data.images import image_pairs
from ..data.shards import regroup
from ..data.workers import STUCK, fitting, image_bytes
from .check_data import has_own_keys
from .feature_cache import FeatureCache
from .openclip import hook, version
from .prefetch import PrefetchLoader, split_normalization


def seed_noise(*keys: int) -> None:
    """Seed PyTorch, numpy and Python by all of the keys together."""
    of_torch, of_numpy, of_python = np.random.SeedSequence(keys).generate_state(3).tolist()
    torch.manual_seed(of_torch)
    np.random.seed(of_numpy)
    random.seed(of_python)


def worker_id() -> int:
    """Return the number of this data worker, 0 in the main process."""
    return getattr(get_worker_info(), "id", 0)


class SeedEachPass:
    """Pipeline stage that seeds the random numbers of the stages after it, for each pass over a worker's shards."""

    def __init__(self, seed: int, rank: int, shared_epoch: SharedEpoch):
        self.seed, self.rank, self.shared_epoch = seed, rank, shared_epoch
        self.passes = Counter()  # by epoch

    def __call__(self, samples: Iterable) -> Iterator:
        epoch = self.shared_epoch.get_value()
        seed_noise(self.seed, epoch, self.rank, worker_id(), self.passes[epoch])
        self.passes[epoch] += 1
        yield from samples


def seed_webdataset(info: DataInfo, seed: int, rank: int) -> None:
    """Make a training webdataset reproducible: shards, order, captions and augmentation."""
    loader = info.dataloader.pipeline[0]
    # Persistent workers draw a seed once a run. They take it from here, as the default generator also makes masks.
    loader.generator = torch.Generator().manual_seed(seed)
    stages = loader.dataset.pipeline
    if isinstance(stages[0], ResampledShards2):  # it adds the epoch itself, and a pass of it never ends
        stages[0].worker_seed = lambda: np.random.SeedSequence([seed, rank, worker_id()]).generate_state(1).item()
    places = [i for i, stage in enumerate(stages) if getattr(stage, "f", None) is _shuffle]
    if len(places) != 1:
        raise RuntimeError(f"OpenCLIP's webdataset pipeline has {len(places)} sample shuffles, not 1: {stages}")
    stages[places[0]].kw["rng"] = random  # its default generator is seeded by process id and clock
    stages.insert(places[0], SeedEachPass(seed, rank, info.shared_epoch))


def read_alike(info: DataInfo, pairs: Callable) -> None:
    """Make a webdataset group and decode samples as the command-line tools do, by `regroup` and `pairs`."""
    stages = info.dataloader.pipeline[0].dataset.pipeline
    names = [getattr(getattr(stage, "f", stage), "__name__", "") for stage in stages]
    expected = version.SELECTION
    first = names.index("_select") if "_select" in names else 0
    end = first + len(expected)
    if names[first:end] != expected or "_select" in names[end:]:
        raise RuntimeError(f"OpenCLIP's webdataset pipeline does not select and decode by {expected}, but: {names}")
    stages[first:end] = [pairs, *(stages[first + i] for i in version.KEPT)]
    reader = max(place for place, name in enumerate(names) if name in ("tarfile_to_samples_nothrow", "tarfile_samples"))
    stages.insert(reader + 1, regroup)


def need_batches(info: DataInfo, shards: str) -> None:
    """Add a stage that raises ValueError for a pass without a batch: OpenCLIP would read the shards for ever."""
    info.dataloader.pipeline[0].dataset.append(partial(_not_empty, shards=shards))


def _not_empty(batches: Iterable, shards: str) -> Iterator:
    found = False
    for batch in batches:
        found = True
        yield batch
    if not found:
        raise ValueError(f"--train-data {shards}: the shards of data worker {worker_id()} hold fewer readable pairs "
                         f"than --batch-size: lower it, or --workers (the log names what is broken)")


def has_other_batches(args) -> bool:
    """Return whether batches hold audio or texts and images of many sizes (OpenCLIP 4.x), which OpenCLIP loads."""
    return any(getattr(args, name, False) for name in ("use_naflex", "variable_text")) or "audio" in getattr(
        args, "dataset_type", "")


@hook
def get_wds_dataset(original, args, preprocess_img, is_train, epoch=0, floor=False, tokenizer=None, **rest):
    """Wrap `open_clip_train.data.get_wds_dataset`: reproducible by --seed, samples as the command-line tools read them.

    If a KEY.txt holds several captions, training draws one at each reading and validation takes the first. If a flag of
    OpenCLIP 4.x names other members of a sample, OpenCLIP reads them.
    """
    if has_other_batches(args):
        return original(args, preprocess_img, is_train, epoch=epoch, floor=floor, tokenizer=tokenizer, **rest)

    def tokenize(text: str):
        captions = text.split(CAPTION_SEPARATOR)
        return tokenizer(random.choice(captions) if is_train and len(captions) > 1 else captions[0])
    info = original(args, preprocess_img, is_train, epoch=epoch, floor=floor, tokenizer=tokenize, **rest)
    if not has_own_keys(args):
        cache = getattr(preprocess_img, "cache", None)
        read_alike(info, partial(cache.pairs, shared_epoch=info.shared_epoch) if cache else image_pairs)
    loader = info.dataloader.pipeline[0]
    loader.pin_memory = str(getattr(args, "device", "cpu")).startswith("cuda")
    if not is_train:  # several workers would mix shards, and the order says which noise a caption gets
        loader.num_workers = min(loader.num_workers, 1)
    else:
        seed_webdataset(info, getattr(args, "seed", 0), getattr(args, "rank", 0))
        need_batches(info, args.train_data)
    return info


class Cached(NamedTuple):
    """Transform of training images that leaves cached tokens, which take their place, as they are."""

    cache: FeatureCache
    transform: Callable

    def __call__(self, image: Image.Image | Tensor) -> Tensor:
        return image if isinstance(image, Tensor) else self.transform(image)


@hook
def get_data(original, args, preprocess_fns, **rest):
    """Wrap `open_clip_train.main.get_data`: copy training images to the device as bytes, one batch ahead."""
    if has_other_batches(args):
        return original(args, preprocess_fns, **rest)
    cache = None
    train, normalize = split_normalization(preprocess_fns[0])
    if getattr(args, "cache_features", None) and args.train_data:
        cache = FeatureCache(args.cache_features, args.train_data, preprocess_fns[1],
                             getattr(args, "unlock_image_after", None))
        train = Cached(cache, train)
    one = image_bytes(preprocess_fns[1])  # of floats. Cached tokens of a large ViT are more, but not twice as much
    one = one * 2 if cache else one // 4 if normalize and args.train_data else one
    args.workers = args.workers and fitting(args.workers, args.batch_size * one)
    if dist.is_initialized():  # the number of steps follows from that of workers
        fewest = torch.tensor(args.workers, device=args.device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN)
        args.workers = int(fewest)
    data = original(args, (train, preprocess_fns[1]), **rest)
    for info in data.values():
        loader = getattr(info.dataloader, "pipeline", [info.dataloader])[0]
        loader.timeout = STUCK * (loader.num_workers > 0)
    if "train" in data:
        info = data["train"]
        if world_info_from_env()[1] == 0:
            from .check_flags import warn_of_warmup  # only training needs it, and it imports much
            warn_of_warmup(args, info.dataloader.num_batches)
        info.dataloader = PrefetchLoader(info.dataloader, getattr(args, "device", "cpu"), normalize,
                                         version.DICT_BATCHES)
        info.dataloader.cache = cache  # for `training.reproducible`
    return data
