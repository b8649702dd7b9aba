"""Build the data set of one run of `clip_benchmark eval`, and the batches that its task reads."""
import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from clip_benchmark.datasets import builder
from torch.utils.data import DataLoader, get_worker_info
from torchvision.transforms import Compose
from webdataset import WebDataset, split_by_worker

from open_clip_mdc.data.captions import without_image
from open_clip_mdc.data.images import sample_image
from open_clip_mdc.data.shards import image_member, read_metadata, read_samples, regroup
from open_clip_mdc.data.text import read_names
from open_clip_mdc.data.workers import STUCK, fitting, image_bytes

from . import foreign_datasets
from .flags import Flags, filled

DECODED = "jpg"  # the member that clip_benchmark reads
Samples = Iterable[dict]  # of shards
NAME = "__name__"  # member with the image's original name, the "filename" of KEY.json


def read_shards(shards: Iterable[dict], read_urls: Callable[[Iterable[dict]], Samples]) -> Samples:
    """Yield the samples of shards. Local ones are read strictly, those on the web by webdataset."""
    for shard in shards:
        yield from read_samples(shard["url"]) if os.path.exists(shard["url"]) else regroup(read_urls([shard]))


def own_samples(samples: Samples, batch_size: int) -> Samples:
    """Yield every W-th batch for each of W workers, before images are decoded.

    With webdataset each worker reads other shards, so that batches and their order would depend on the number of
    workers.
    """
    worker = get_worker_info()
    first, step = (worker.id, worker.num_workers) if worker else (0, 1)
    return (sample for number, sample in enumerate(samples) if number // batch_size % step == first)


def decode_images(samples: Samples) -> Samples:
    """Yield each sample of a webdataset with its upright RGB image as DECODED, its name, and its labels or captions."""
    for sample in samples:
        if not image_member(sample):
            raise ValueError(f"{sample['__url__']}: no image in {without_image(sample)}")
        yield {name: x for name, x in sample.items() if name in ("cls", "npy", "txt") or name.startswith("__")} | {
            DECODED: sample_image(sample), NAME: str(read_metadata(sample).get("filename", ""))}


def read_as_ours(dataset: WebDataset, root: str, batch_size: int) -> None:
    """Replace the stages of clip_benchmark's webdataset that read shards, and its class names and templates."""
    for field, name in (("classes", "classnames.txt"), ("templates", "zeroshot_classification_templates.txt")):
        if getattr(dataset, field) and os.path.isfile(path := os.path.join(root, name)):
            vars(dataset)[field] = read_names(path)
    place = dataset.pipeline.index(split_by_worker)
    dataset.pipeline[place:place + 2] = [partial(read_shards, read_urls=dataset.pipeline[place + 1]),
                                         partial(own_samples, batch_size=batch_size), decode_images]
    dataset.pipeline[place + 3].args[0].partial = True  # webdataset's decoder then passes on decoded images


class Job(NamedTuple):
    """One model on one data set. `args` are clip_benchmark's, with the names, the task and the device resolved."""

    args: Namespace
    flags: Flags
    options: dict  # arguments of the model's method by our flags, with defaults filled in
    output: Path
    # These are None until the model is loaded.
    model: torch.nn.Module = None  # or `towers.Towers`
    transform: Callable = None
    tokenizer: Callable = None

    @property
    def by_cosine(self) -> bool:
        """Return whether images and texts are compared by cosine, as by CLIP models, and not by likelihood."""
        return self.options.get("method", "cosine") == "cosine"

    def autocast(self) -> torch.autocast:
        """Return the context of all forward passes, which does nothing with --no_amp."""
        return torch.autocast(self.args.device, enabled=self.args.amp)

    def build(self, split: str, transform: Callable | None = None):
        """Return the data set, with the model's transform unless another is given."""
        args, transform, name = self.args, transform or self.transform, self.args.dataset.removeprefix("wds/")
        root = filled("--dataset_root", args.dataset_root, dataset=name, dataset_cleaned=name.replace("/", "-"))
        kind = foreign_datasets.kind_of(args.dataset)
        if kind == "masked":
            from .datasets import masks
            return masks.build(args.dataset, root, split, transform)
        captioned = args.task in ("captioning", "cloze", "zeroshot_retrieval")
        if kind != "foreign":
            from .selection_datasets import build_dataset
            templates = foreign_datasets.templates_of(args.dataset, args.custom_template_file, args.language) \
                if kind == "classes" else ()
            return build_dataset(args.dataset, root, transform, split, captioned and not (
                args.task == "zeroshot_retrieval" and self.by_cosine), templates)
        seed = args.seed if args.dataset == foreign_datasets.FOLDER and args.split == "test" else None
        try:
            dataset = foreign_datasets.build(
                args.dataset, root, transform, split, seed=seed, annotation_file=args.annotation_file,
                language=args.language, task="captioning" if args.task == "cloze" else args.task,
                custom_template_file=args.custom_template_file, wds_cache_dir=args.wds_cache_dir,
                custom_classname_file=args.custom_classname_file)
        except FileNotFoundError as problem:
            if not args.dataset.startswith("wds/"):
                raise
            raise FileNotFoundError(
                f"no webdataset in {root}: --dataset_root should be a folder with {split}/nshards.txt and {split}/0.tar"
                ", ..., or https://huggingface.co/datasets/clip-benchmark/wds_NAME/tree/main") from problem
        except UnicodeDecodeError as problem:
            raise ValueError(f"a text in {root} is not UTF-8 ({problem}): save it as UTF-8") from problem
        except AssertionError as problem:  # clip_benchmark's, such as for missing class names
            raise ValueError(f"{args.dataset} in {root} is not fit for {args.task}: {problem}") from problem
        if args.dataset.startswith("wds/"):
            read_as_ours(dataset, root, args.batch_size)
        if not captioned:
            return dataset
        from .datasets.caption_data import with_keys
        return with_keys(dataset, transform)

    def load(self, split: str, transform: Callable | None = None) -> DataLoader:
        """Return batches of `build` without --corruption, in the data set's order whatever the number of workers."""
        dataset, args = self.build(split, transform), self.args
        workers = args.num_workers and fitting(args.num_workers, args.batch_size * image_bytes(transform))
        size, collate = args.batch_size, None
        if args.dataset.startswith("wds/"):
            dataset, size = dataset.batched(size), None  # which makes the batches itself
            # Each worker reads all shards, so one worker is enough for shards on the web.
            workers = min(workers, 1) if "://" in args.dataset_root else workers
        else:
            collate = getattr(dataset, "collate_fn", None) or builder.get_dataset_collate_fn(args.dataset)
        return DataLoader(dataset, size, num_workers=workers, collate_fn=collate, timeout=STUCK * (workers > 0))

    def load_test(self, transform: Callable | None = None) -> DataLoader:
        """Return batches of the test split, with --corruption."""
        transform = transform or self.transform
        if self.flags.corruption is not None:
            from .datasets import corruptions
            transform = Compose([corruptions.parse(self.flags.corruption), transform])
        return self.load(self.args.split, transform)

    def load_splits(self, batches: DataLoader) -> dict[str, DataLoader]:
        """Return the batches of "train", "val" if it is given, and "test". Raises ValueError if classes differ."""
        names = (("train", self.args.train_split), ("val", self.args.val_split))
        loaders = {split: self.load(name) for split, name in names if name is not None} | {"test": batches}
        foreign_datasets.check_classes({split: loader.dataset for split, loader in loaders.items()})
        return loaders
