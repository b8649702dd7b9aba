"""From OpenCLIP's data pipeline to the device, for CLIP models too.

All random numbers are a function of --seed, epoch, rank and worker. OpenCLIP seeds a process once, and its webdataset
shuffle by process id and clock, so no two runs are equal and a resumed run repeats the noise of its first epoch. Here
each epoch is seeded anew: by `seed_noise` in the process that trains, by `SeedEachPass` where samples are read.

Images are transferred as uint8 from pinned memory, one batch ahead, and normalised on the device.

Dimensions: B images.
"""
import random
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from open_clip_train.data import CsvDataset, DataInfo, ResampledShards2, SharedEpoch
from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms import Compose, Normalize, ToTensor
from torchvision.transforms.functional import pil_to_tensor
from webdataset.filters import _shuffle
from webdataset.handlers import reraise_exception

from ..data.csv_pairs import read_table
from ..data.images import decode_image, image_pairs
from ..data.shards import CAPTION_SEPARATOR, META, as_file, regroup, training_members
from .feature_cache import FeatureCache
from .hook import hook
from .upstream import MAJOR


def seed_noise(*keys: int) -> None:
    """Seed PyTorch, numpy and Python by all of the keys together."""
    seeds = np.random.SeedSequence(keys).generate_state(3)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    random.seed(int(seeds[2]))


def worker_id() -> int:
    worker = get_worker_info()
    return 0 if worker is None else worker.id


class SeedEachPass:
    """Pipeline stage that seeds what the stages after it draw, anew for each pass over a worker's shards."""

    def __init__(self, seed: int, rank: int, shared_epoch: SharedEpoch):
        self.seed, self.rank, self.shared_epoch = seed, rank, shared_epoch
        self.epoch, self.passes = -1, 0

    def __call__(self, samples: Iterable) -> Iterator:
        epoch = self.shared_epoch.get_value()
        self.passes = self.passes + 1 if epoch == self.epoch else 0
        self.epoch = epoch
        seed_noise(self.seed, epoch, self.rank, worker_id(), self.passes)
        yield from samples


def seed_webdataset(info: DataInfo, seed: int, rank: int) -> None:
    """Make a training webdataset repeatable: shards, order, captions and augmentation."""
    loader = info.dataloader.pipeline[0]
    # Workers that live on draw their first seed once a run: not from the numbers that also make masks and dropout.
    loader.generator = torch.Generator().manual_seed(seed)
    stages = loader.dataset.pipeline
    if isinstance(stages[0], ResampledShards2):  # adds the epoch to what this returns; needs no pass, it never ends
        stages[0].worker_seed = lambda: int(np.random.SeedSequence([seed, rank, worker_id()]).generate_state(1)[0])
    places = [i for i, stage in enumerate(stages) if getattr(stage, "f", None) is _shuffle]
    if len(places) != 1:
        raise RuntimeError(f"the webdataset pipeline has {len(places)} sample shuffles, not 1: {stages}")
    stages[places[0]].kw["rng"] = random  # by default a generator of its own, seeded by process id and clock
    stages.insert(places[0], SeedEachPass(seed, rank, info.shared_epoch))


# The stages by which OpenCLIP selects and decodes, and which of them stay: in 4.x captions are tokenized in between.
SELECTION = (["_select", "_rename", "_select", "_map_dict", "_map_dict", "_map_dict"], (3, 5)) if MAJOR > 3 else (
    ["_select", "_decode", "_rename"], ())


def read_alike(info: DataInfo, pairs: Callable = image_pairs) -> None:
    """Make a webdataset group and decode samples as the tools do: `regroup`, `image_pairs`, or what stands for it."""
    stages = info.dataloader.pipeline[0].dataset.pipeline
    names = [getattr(getattr(stage, "f", stage), "__name__", "") for stage in stages]
    expected, kept = SELECTION
    first = names.index("_select") if "_select" in names else 0
    end = first + len(expected)
    if names[first:end] != expected or "_select" in names[end:]:
        raise RuntimeError(f"the webdataset pipeline selects and decodes otherwise: {names}")
    stages[first:end] = [pairs, *(stages[first + i] for i in kept)]
    reader = max(place for place, name in enumerate(names) if name in ("tarfile_to_samples_nothrow", "tarfile_samples"))
    stages.insert(reader + 1, regroup)


def need_batches(info: DataInfo, shards: str) -> None:
    """Add a stage that raises ValueError for a pass without a batch: OpenCLIP would read the shards for ever."""
    info.dataloader.pipeline[0].dataset.append(partial(_not_in_vain, shards=shards))


def _not_in_vain(batches: Iterable, shards: str) -> Iterator:
    found = False
    for batch in batches:
        found = True
        yield batch
    if not found:
        raise ValueError(f"--train-data {shards}: the shards of data worker {worker_id()} hold fewer pairs that can be "
                         f"read than --batch-size (the log names what is broken)")


class CsvImages(CsvDataset):
    """OpenCLIP's data set of a CSV file, rows and images read as the tools read them. A bad image is named."""

    def __init__(self, input_filename, transforms, img_key, caption_key, sep="\t", tokenizer=None, variable_text=False):
        rows = read_table(input_filename, img_key, caption_key, sep)
        self.images, self.captions = [row.image for row in rows], [row.caption for row in rows]
        self.transforms, self.tokenize = transforms, partial(tokenizer, pad=False) if variable_text else tokenizer

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        image = decode_image(Path(str(self.images[index])))
        image = image if self.transforms is None else self.transforms(image)
        text = self.tokenize([str(self.captions[index])])[0]
        return {"image": image, "text": text} if MAJOR > 3 else (image, text)


def to_bytes(image: Image.Image) -> Tensor:
    """Return uint8 [3, height, width], contiguous as `ToTensor` makes it: convolutions round by layout."""
    return pil_to_tensor(image).contiguous()


def split_normalization(transform: Callable) -> tuple[Callable, Normalize | None]:
    """Split a transform into one that ends in `to_bytes` and the normalisation of its result divided by 255.

    One that does not end in ToTensor and Normalize is returned as it is, with None.
    """
    stages = getattr(transform, "transforms", [])
    if len(stages) > 1 and isinstance(stages[-2], ToTensor) and isinstance(stages[-1], Normalize):
        return Compose([*stages[:-2], to_bytes]), stages[-1]
    return transform, None


def pair(batch: tuple[Tensor, Tensor] | dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return image and text of a batch, which has names in OpenCLIP 4.x."""
    return (batch["image"], batch["text"]) if isinstance(batch, dict) else batch


def one_ahead(items: Iterable, start: Callable) -> Iterator:
    """Yield start(item) of each item, started before the one before it is taken."""
    ahead = []
    for item in items:
        ahead.append(start(item))
        if len(ahead) > 1:
            yield ahead.pop(0)
    yield from ahead


class PrefetchLoader:
    """Training loader whose batches are on the device, normalised and prepared, one ahead of the step."""

    def __init__(self, loader: Iterable, device: str, normalize: Normalize | None, named: bool = False):
        self.loader, self.device, self.named = loader, torch.device(device), named
        self.prepare: Callable = lambda text: text  # a captioner's is `Captioner.prepare`, on the CPU
        self.cache: FeatureCache | None = None
        self.mean, self.std = None, None
        if normalize is not None:
            self.mean, self.std = (torch.as_tensor(x, dtype=torch.float32).view(-1, 1, 1).to(self.device)
                                   for x in (normalize.mean, normalize.std))

    def __getattr__(self, name: str):
        return getattr(self.loader, name)  # num_batches, num_samples

    def __iter__(self) -> Iterator[tuple | dict]:
        pairs = map(pair, self.loader)
        made = map(self.finish, one_ahead(pairs, self.start)) if self.device.type == "cuda" else (
            (self.normalized(image.to(self.device)), self.prepare(text).to(self.device)) for image, text in pairs)
        return ({"image": image, "text": text} for image, text in made) if self.named else made

    def start(self, batch: tuple) -> tuple:
        image, text = batch
        text = self.prepare(text).pin_memory()
        with torch.cuda.stream(self.stream):
            batch = tuple(x.to(self.device, non_blocking=True) for x in (image, text))
            return batch, self.stream.record_event()

    def finish(self, started: tuple) -> tuple:
        """Make the present stream wait for a batch, and its memory wait for the present stream."""
        (image, text), arrived = started
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(arrived)
        image.record_stream(stream)
        text.record_stream(stream)
        return self.normalized(image), text

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def normalized(self, image: Tensor) -> Tensor:
        """Return what the end of the transform would have made of it, float [B, 3, H, W], to the last bit.

        Tokens of a `FeatureCache` are as they were.
        """
        if self.cache is not None:
            return image.float()
        if self.mean is None:
            return image
        return image.float().div_(255).sub_(self.mean).div_(self.std)


OWN_KEYS = {"json_text_key": None, "text_key": "txt", "image_key": "jpg;png;jpeg;webp"} if MAJOR > 3 else {}


def has_other_batches(args) -> bool:
    """Return whether batches are more than images and texts of one size: OpenCLIP 4.x's own, which are left to it."""
    return any(getattr(args, name, False) for name in ("use_naflex", "variable_text")) or "audio" in getattr(
        args, "dataset_type", "")


@hook
def get_wds_dataset(original, args, preprocess_img, is_train, epoch=0, floor=False, tokenizer=None, **rest):
    """Wrap `open_clip_train.data.get_wds_dataset`: repeatable by --seed, images read as the tools read them.

    Of several captions in a KEY.txt training draws one at each reading, validation takes the first. Where a flag of 4.x
    names other members of a sample, OpenCLIP reads them.
    """
    if has_other_batches(args):
        return original(args, preprocess_img, is_train, epoch=epoch, floor=floor, tokenizer=tokenizer, **rest)

    def tokenize(text: str):
        captions = text.split(CAPTION_SEPARATOR)
        return tokenizer(random.choice(captions) if is_train and len(captions) > 1 else captions[0])
    info = original(args, preprocess_img, is_train, epoch=epoch, floor=floor, tokenizer=tokenize, **rest)
    if not any(getattr(args, flag, usual) != usual for flag, usual in OWN_KEYS.items()):
        read_alike(info, getattr(preprocess_img, "cache", image_pairs))
    info.dataloader.pipeline[0].pin_memory = str(getattr(args, "device", "cpu")).startswith("cuda")
    if is_train:
        seed_webdataset(info, getattr(args, "seed", 0), getattr(args, "rank", 0))
        need_batches(info, args.train_data)
    return info


@hook
def gopen(original, url, mode="rb", *args, **kwargs):
    """Wrap `webdataset.gopen.gopen`: what is a file is opened as a file, whatever its name."""
    return original(as_file(url) if mode == "rb" else url, mode, *args, **kwargs)


@hook
def tar_file_iterator(original, fileobj, skip_meta=META, handler=reraise_exception, select_files=None,
                      rename_files=None):
    """Replace `webdataset.tariterators.tar_file_iterator`: a member's size is looked at before it is read."""
    return training_members(fileobj, skip_meta, handler, select_files, rename_files)


def csv_dataset(original):
    return CsvImages


class Cached:
    """A transform that leaves tokens as they are, where they take the place of training images."""

    def __init__(self, cache: FeatureCache):
        self.cache = cache

    def __call__(self, tokens: Tensor) -> Tensor:
        return tokens


@hook
def get_data(original, args, preprocess_fns, epoch=0, tokenizer=None, **rest):
    """Wrap `open_clip_train.main.get_data`: training images reach the device as bytes, one batch ahead."""
    if has_other_batches(args):
        return original(args, preprocess_fns, epoch=epoch, tokenizer=tokenizer, **rest)
    cache = None
    if getattr(args, "cache_features", None) and args.train_data:
        cache = FeatureCache(args.cache_features, args.train_data, preprocess_fns[1])
        train, normalize = Cached(cache), None
    else:
        train, normalize = split_normalization(preprocess_fns[0])
    data = original(args, (train, preprocess_fns[1]), epoch=epoch, tokenizer=tokenizer, **rest)
    if "train" in data:
        device = getattr(args, "device", "cpu")
        data["train"].dataloader = PrefetchLoader(data["train"].dataloader, device, normalize, MAJOR > 3)
        data["train"].dataloader.cache = cache
    return data
