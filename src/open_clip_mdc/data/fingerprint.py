"""Hashes of models and data sets, by which results and caches know what they were made from.

Every file that a data set names counts by its content (SHA-256), and not by its place or time. Captions, labels, class
names and templates count as they are.
"""
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset

from .files import files_below, sha256
from .weights import hash_tensor

# Attributes for how images are read, which a cache key has elsewhere (`features.describe_data`), and a stream's stages.
PASSED_OVER = ("transform", "transforms", "target_transform", "loader", "pipeline")

NO_BLOCKS = "block_sizes=(), "  # of caption_cfg, left out so that names of kept files are those of older versions


def fingerprint(model: torch.nn.Module) -> str:
    """Return the SHA-256 of a model's weights and settings.

    Weights alone do not decide what a model computes: those of ViT-B-32 also fit ViT-B-32-quickgelu. So the types of
    modules and their plain attributes (number of heads, pooling, image mean and size) are hashed, too.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if k != "training" and _is_plain(v)}
        digest.update(f"{name} {type(module).__name__} {sorted(settings.items())}".replace(NO_BLOCKS, "").encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode())
            hash_tensor(digest, tensor)
    return digest.hexdigest()


def _is_plain(value: object) -> bool:
    if dataclasses.is_dataclass(value):  # caption_cfg
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def text_of(value: object) -> str:  # without memory addresses, which differ from run to run
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def shards_of(dataset: Dataset) -> list[str]:
    return [url for stage in getattr(dataset, "pipeline", []) for url in getattr(stage, "urls", [])]


def hash_values(*values: object) -> str:
    """Return the SHA-256 of values in any nesting of lists and tuples: tensors by content, others as they print."""
    digest = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, (tuple, list)):
            for part in value:
                add(part)
        elif isinstance(value, torch.Tensor):
            hash_tensor(digest, value)
        else:
            digest.update(text_of(value).encode())

    add(values)
    return digest.hexdigest()


class Contents:
    """Digest of what a data set holds. `images` is the number of files and images in it so far."""

    def __init__(self, folder: str):
        self.digest, self.folder, self.images = hashlib.sha256(), folder, 0
        self.seen = {}  # by id, each object with parts and its number

    def add_text(self, kind: str, text: str) -> None:
        self.digest.update(f"{kind} {len(text)} {text}\n".encode(errors="surrogatepass"))

    def add_file(self, path: str) -> None:
        self.images += 1
        self.add_text("file", sha256(path))

    def add_name(self, name: str) -> None:
        path = os.path.join(self.folder, name)
        if len(name) < 1000 and os.path.isfile(path):
            self.add_file(path)
        elif not (os.sep in name and os.path.isdir(path)):
            self.add_text("text", name)

    def add(self, value: object) -> None:
        if isinstance(value, (str, Path)):
            self.add_name(str(value))
        elif value is None or isinstance(value, (bool, int, float)):
            self.add_text("plain", repr(value))
        elif isinstance(value, bytes):
            self.add_text("bytes", hashlib.sha256(value).hexdigest())
        elif isinstance(value, torch.Tensor) or isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.images += len(value) if value.ndim >= 3 else 0
            hash_tensor(self.digest, torch.as_tensor(np.ascontiguousarray(value)))
        elif isinstance(value, Image.Image):
            self.images += 1
            self.add_text(f"{value.mode} {value.size}", hashlib.sha256(value.tobytes()).hexdigest())
        elif id(value) in self.seen:
            self.add_text("again", str(self.seen[id(value)][0]))
        else:
            self.add_parts(value)

    def add_parts(self, value: object) -> None:
        self.seen[id(value)] = len(self.seen), value  # keeps the object alive, so that no other gets its id
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple, np.ndarray)):
            parts = list(value)
        elif isinstance(value, (set, frozenset)):
            parts = sorted(value, key=repr)
        elif isinstance(value, Dataset) or dataclasses.is_dataclass(value) or type(value).__module__.startswith(
                "pycocotools"):
            parts = [part for name, own in sorted(vars(value).items()) if name not in PASSED_OVER
                     for part in (name, own)]
        else:
            return self.add_text("object", text_of(value))
        self.add_text(type(value).__name__, str(len(parts)))
        for part in parts:
            self.add(part)


def of_dataset(dataset: Dataset) -> str:
    """Return the SHA-256 of all that a data set holds except its transform. Shards on the web count by address."""
    inner = dataset
    while isinstance(inner, Subset):
        inner = inner.dataset
    root = getattr(inner, "root", None)
    found = Contents(str(root) if isinstance(root, (str, Path)) else "")
    found.add(dataset)
    for shard in shards_of(inner):
        found.add(shard)
    # If its attributes do not lead to all images, every file below its root counts.
    if root and not isinstance(inner, IterableDataset) and found.images < len(inner) and os.path.isdir(root):
        for path in files_below(root):
            found.add_text("name", os.path.relpath(path, root))
            found.add_file(path)
    return found.digest.hexdigest()
