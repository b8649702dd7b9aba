"""Extract image features for the linear probe (Sec. 4.1), and cache them between runs.

Cache files are named by content: weights, images and their transform, kind of feature, precision. clip_benchmark names
them by the checkpoint's path, which may hold new weights.

Dimensions: B images of a batch, N images, P patches, D width.
"""
import itertools
import json
import os
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from typing import BinaryIO

import numpy as np
import torch
from open_clip.transformer import VisionTransformer
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from open_clip_mdc.data import fingerprint
from open_clip_mdc.data.cache import name_of
from open_clip_mdc.data.fingerprint import hash_values, text_of
from open_clip_mdc.data.weights import save_tensors
from open_clip_mdc.models.towers import tower

from .distributed import everywhere, gathered, is_first, own_batches
from .results import precision

Features = tuple[Tensor, Tensor]  # [N, D], and the targets [N]
Tensors = dict[str, Tensor]
Encode = Callable[[Tensor], Tensors]  # images [B, 3, H, W] -> tensors [B, ...]


def default_feature(model: torch.nn.Module) -> str:
    """Return the feature that the paper probes (Sec. 4.2), "gap" for captioners and "cls" for CLIP, else "pooled".

    An image tower alone has "cls" if it has a class token, else "gap".
    """
    if hasattr(model, "encode_image_tokens"):
        return "gap"
    if not hasattr(model, "encode_image"):
        return "cls" if tower(model).has_class_token else "gap"
    visual = getattr(model, "visual", None)
    return "cls" if isinstance(visual, VisionTransformer) and visual.attn_pool is None else "pooled"


def feature_fn(model: torch.nn.Module, kind: str) -> Callable[[Tensor], Tensor]:
    """Return the function from images [B, 3, height, width] to features [B, D] of any model of clip_benchmark.

    gap: mean of the patch tokens after the final LayerNorm.
    cls: the [CLS] token after the final LayerNorm and before the projection, as the paper probes CLIP.
    pooled: `model.encode_image`, which clip_benchmark probes for every model, after the projection if there is one.
    pixels: the preprocessed image itself, to see how much a probe finds without a network.

    Raises ValueError if the model's image tower has no such feature.
    """
    if kind == "pixels":
        return lambda image: image.flatten(1)
    if not hasattr(model, "encode_image"):  # an image tower alone
        if kind == "pooled":
            raise ValueError("feature 'pooled' needs a model that embeds images, not an image tower alone: use gap")
        return partial(tower(model).features, kind=kind)
    if kind == "pooled":
        return model.encode_image
    if kind == "gap" and hasattr(model, "encode_image_tokens"):
        return lambda image: model.encode_image_tokens(image).mean(1)
    visual = getattr(model, "visual", None)
    name = type(model if visual is None else visual).__name__
    # An attentional pooler replaces both the class token and the final LayerNorm of the patch tokens.
    if not hasattr(visual, "forward_intermediates") or getattr(visual, "attn_pool", None) is not None:
        raise ValueError(f"feature {kind!r} needs an image tower of plain tokens, not this {name}: use pooled")
    if kind == "cls" and not isinstance(visual, VisionTransformer):
        raise ValueError(f"feature 'cls' needs OpenCLIP's own ViT and its class token, not this {name}: use gap")
    if kind == "cls":
        return partial(tower(visual).features, kind="cls")
    return lambda image: visual.forward_intermediates(
        image, indices=1, normalize_intermediates=True, intermediates_only=True)["image_intermediates"][0].mean((2, 3))


@torch.no_grad()
def encode_batch(encode: Encode, images: Tensor, targets: Tensor | list[Tensor], args: Namespace,
                 desc: str) -> Tensors:
    """Return the tensors of a batch and its targets, on the CPU. Raises ValueError if one is not finite."""
    with torch.autocast(args.device, enabled=args.amp):
        found = {name: x.cpu().contiguous() for name, x in encode(images.to(args.device, non_blocking=True)).items()}
    if wrong := [name for name, x in found.items() if not x.isfinite().all()]:
        raise ValueError(f"{desc}: the image encoder gave NaN or infinity as {', '.join(wrong)}" +
                         ": try --no_amp" * args.amp)
    masks = isinstance(targets, list) and isinstance(targets[0], Tensor) and targets[0].ndim == 2
    return found | ({f"mask.{row}": mask for row, mask in enumerate(targets)} if masks else
                    {"targets": torch.as_tensor(targets)})


def extract_features(encode: Callable[[Tensor], Tensor], dataloader: Iterable, args: Namespace,
                     desc: str = "features") -> Features:
    """Encode the (images, targets) batches of a loader: features [N, D] and targets [N], on the CPU.

    Each batch is encoded by one process. Both are in files of --feature_root without a name, mapped into memory.
    Raises ValueError if the loader is empty, or a feature is not finite.
    """
    encoded = ((i, encode_batch(lambda images: {"features": encode(images)}, images, target, args, desc))
               for i, (images, target) in own_batches(dataloader, desc))

    def mapped(file: BinaryIO, like: Tensor) -> Tensor:
        file.flush()
        content = torch.from_numpy(np.memmap(file, mode="c"))  # the map outlives the file
        return content.view(like.dtype).unflatten(0, (-1, *like.shape[1:]))

    # Targets too, as small tensors in memory would keep the system from taking back the batches between them.
    with tempfile.TemporaryFile(dir=args.feature_root) as features, tempfile.TemporaryFile(
            dir=args.feature_root) as targets:
        batch = {}
        for batch in gathered(encoded):
            for file, part in zip((features, targets), batch.values(), strict=True):
                file.write(part.contiguous().view(torch.uint8).numpy())
        if not batch:
            raise ValueError(f"{desc}: the data set is empty")
        return mapped(features, batch["features"]), mapped(targets, batch["targets"])


class Rows:
    """Rows of features that stay where they are, on disk or in another `Rows`, until some are asked for."""

    def __init__(self, *parts: tuple["Tensor | Rows", Tensor]):
        """Take features [n, D] and row numbers [R] in them, of one part behind the other."""
        self.parts = [features for features, _ in parts]
        self.part = torch.cat([torch.full_like(rows, number) for number, (_, rows) in enumerate(parts)])
        self.row = torch.cat([rows for _, rows in parts])
        self.shape, self.dtype = (len(self.row), *self.parts[0].shape[1:]), self.parts[0].dtype

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Tensor) -> Tensor:
        """Return the features [B, D] of places [B]."""
        part, row = self.part[index], self.row[index]
        found = torch.empty(len(index), *self.shape[1:], dtype=self.dtype)
        for number, features in enumerate(self.parts):
            found[part == number] = features[row[part == number]]
        return found


def cache_key(model: str, dataloader: Iterable, split: str, kind: str, normalize: bool, args: Namespace) -> dict:
    # `model` is its fingerprint.
    return {"model": model, "open_clip": metadata.version("open_clip_torch"), "split": split, "feature": kind,
            "normalize": bool(normalize), "precision": precision(args), "data": describe_data(dataloader)}


def describe_data(dataloader: Iterable) -> dict:
    """Return what identifies a loader's images: content, number, transform, a hash of samples."""
    dataset = getattr(dataloader, "dataset", dataloader)
    about = {"content": fingerprint.of_dataset(dataset)}
    if isinstance(dataset, IterableDataset):
        samples = list(itertools.islice(dataset, 1))
        if getattr(dataloader, "batch_size", 1) is None:  # the stream makes its own batches, whose size must not count
            samples = [[part[0] for part in batch] for batch in samples]
    else:
        about["images"] = len(dataset)
        # Samples also show what a printed transform leaves out.
        samples = [dataset[i] for i in sorted({0, len(dataset) // 2, len(dataset) - 1})] if len(dataset) else []
    while isinstance(dataset, Subset):  # a random part, as for --val_proportion
        dataset = dataset.dataset
    transforms = [arg for stage in getattr(dataset, "pipeline", []) for arg in getattr(stage, "args", ())
                  if callable(arg)]  # those of a WebDataset
    about["source"] = fingerprint.shards_of(dataset) or type(dataset).__name__  # only for people who read the file
    about["transform"] = [text_of(t) for t in transforms] or text_of(getattr(dataset, "transform", None))
    about["sample"] = hash_values(samples)
    return about


def note_of(args: Namespace) -> str:
    return f"{args.model} {args.pretrained} {args.dataset}"


def cached_features(args: Namespace, key: dict, extract: Callable[[], Features]) -> Features:
    """Return the features [N, D] and targets [N] of a key from its file, or extract them and write it."""
    os.makedirs(args.feature_root, exist_ok=True)  # fail before the long work if it cannot be written
    path = feature_path(args.feature_root, key)
    found = None
    try:
        found = load_features(path, key)
    except FileNotFoundError:
        pass  # not cached yet
    except ValueError as error:
        warnings.warn(f"{error}: extracting these features again", stacklevel=2)
    if everywhere(found is not None):  # processes extract together or not at all
        return found
    found = extract()
    if is_first():
        save_features(path, key, *found, note_of(args))
    return found


def feature_path(folder: str, key: dict) -> str:
    return os.path.join(folder, f"{key['split']}-{name_of(key)}.safetensors")


def save_features(path: str, key: dict, features: Tensor, targets: Tensor, note: str = "") -> None:
    # The checksum is for flipped bits, which the format would not notice.
    tensors = {"features": features.contiguous(), "targets": targets.contiguous()}
    save_tensors(path, tensors, {
        "key": json.dumps(key, sort_keys=True), "checksum": hash_values(features, targets), "note": note})


def load_features(path: str, key: dict) -> Features:
    """Return features [N, D], mapped into memory, and targets [N]. Raises ValueError for a file of something else."""
    try:
        with safe_open(path, "pt") as file:
            about, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    if tensors.keys() != {"features", "targets"} or about.get("checksum") != hash_values(
            tensors["features"], tensors["targets"]):
        raise ValueError(f"{path} is damaged (its checksum is wrong)")
    if about.get("key") != json.dumps(key, sort_keys=True):
        raise ValueError(f"{path} holds features of another model or data set")
    return tensors["features"], tensors["targets"]
