"""Image features for the linear probe (the paper's section 4.1), and the files that keep them between runs.

Upstream keeps features under the checkpoint's *path*, so that a checkpoint which is overwritten is probed with the
features of the old one. Here they are kept under what they were computed from: the weights, the images and their
transform, the kind of feature and the precision.

B batch, N images, P patches, D width.
"""

import hashlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable

import torch
from open_clip.transformer import VisionTransformer
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch.utils.data import IterableDataset, Subset

from open_clip_mdc.checkpoints import hash_tensor
from open_clip_mdc.data.files import new_file

from .distributed import everywhere, merge, own_batches
from .results import precision

FEATURE_KINDS = ("gap", "cls", "pooled")


def default_feature(model: torch.nn.Module) -> str:
    """Returns the kind that the paper probes: "gap" for captioners, "cls" for CLIP (Sec. 4.2).

    Towers without a class token of OpenCLIP's are probed as upstream does, "pooled".
    """
    if hasattr(model, "encode_image_tokens"):
        return "gap"
    visual = getattr(model, "visual", None)
    return "cls" if isinstance(visual, VisionTransformer) and visual.attn_pool is None else "pooled"


def feature_fn(model: torch.nn.Module, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that turns images [B, 3, H, W] into features [B, D]; the model itself is left as it is.

    gap: mean of the patch tokens after the final LayerNorm (a captioner's `encode_image`).
    cls: the [CLS] token after the final LayerNorm and before the projection, as the paper probes CLIP.
    pooled: `model.encode_image`, as upstream probes every model: after the projection for CLIP, the same as gap for a
    captioner, which has none.

    Args:
        model: A captioner (it has `encode_image_tokens`) or any model of clip_benchmark.
        kind: "gap", "cls" or "pooled".

    Raises:
        ValueError: The kind is unknown, or the model's image tower has no such feature.
    """
    if kind not in FEATURE_KINDS:
        raise ValueError(f"unknown feature {kind!r}: choose one of {', '.join(FEATURE_KINDS)}")
    if kind == "pooled" or (kind == "gap" and hasattr(model, "encode_image_tokens")):
        return lambda image: model.encode_image(image)

    visual = getattr(model, "visual", None)
    tower = type(visual).__name__ if visual is not None else type(model).__name__
    # An attentional pooler replaces both the class token and the final LayerNorm of the patch tokens.
    if not hasattr(visual, "forward_intermediates") or getattr(visual, "attn_pool", None) is not None:
        raise ValueError(f"feature {kind!r} needs an image tower of plain tokens, not this {tower}: use pooled")
    if kind == "cls" and not isinstance(visual, VisionTransformer):
        raise ValueError(f"feature 'cls' needs OpenCLIP's own ViT and its class token, not this {tower}: use gap")

    def last_tokens(image: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return visual.forward_intermediates(
            image, indices=1, normalize_intermediates=True, intermediates_only=True, output_extra_tokens=kind == "cls")

    if kind == "cls":
        return lambda image: last_tokens(image)["image_intermediates_prefix"][0][:, 0]
    return lambda image: last_tokens(image)["image_intermediates"][0].mean(dim=(2, 3))


@torch.no_grad()
def extract_features(
        encode: Callable[[torch.Tensor], torch.Tensor],
        dataloader: Iterable,
        device: str | torch.device,
        amp: bool,
        desc: str = "features",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes every image of a data loader, each batch on one process where there are several.

    Args:
        encode: Images [B, 3, H, W] on the device -> features [B, D].
        dataloader: Gives (images, targets) batches.
        device: Where the model is.
        amp: Encode under autocast.
        desc: Label of the progress bar.

    Returns:
        The features [N, D], in the precision in which they came, and the targets [N], both on the CPU.

    Raises:
        ValueError: The loader is empty, or a feature is not finite.
    """
    device = torch.device(device)
    encoded = []
    for i, (images, target) in own_batches(dataloader, desc):
        with torch.autocast(device.type, enabled=amp):
            batch = encode(images.to(device, non_blocking=True)).cpu()
        if not batch.isfinite().all():
            advice = "; try --no_amp" if amp else ""
            raise ValueError(f"{desc}: the image encoder gave NaN or infinity{advice}")
        encoded.append((i, (batch, torch.as_tensor(target))))
    encoded = merge(encoded)
    if not encoded:
        raise ValueError(f"{desc}: the data set is empty")
    features, targets = zip(*encoded, strict=True)
    return torch.cat(features), torch.cat(targets)


def cache_key(
        fingerprint: str, dataloader: Iterable, split: str, kind: str, normalize: bool, device: str | torch.device,
        amp: bool,
) -> dict:
    """Returns all that the features of one split depend on, as plain values.

    Args:
        fingerprint: `checkpoints.fingerprint` of the model.
        dataloader: The loader of this split.
        split: "train", "val" or "test".
        kind: The kind of feature.
        normalize: Whether the features have length 1.
        device: Where they are computed; it decides autocast's precision.
        amp: Whether they are computed under autocast.
    """
    return {
        "model": fingerprint,
        "split": split,
        "feature": kind,
        "normalize": bool(normalize),
        "precision": precision(device, amp),
        "data": describe_data(dataloader),
    }


def describe_data(dataloader: Iterable) -> dict:
    """Returns what tells a loader's images from others: where they come from, how many, transform, a sample's hash.

    Nothing but the loader is asked, so that it works for every data set of clip_benchmark. The sample (the first image
    of a stream; first, middle and last image otherwise, all transformed) catches what a printed data set or transform
    leaves out. Files of a WebDataset count with size and time of change.
    """
    dataset = getattr(dataloader, "dataset", dataloader)
    about = {}
    if isinstance(dataset, IterableDataset):
        samples = list(itertools.islice(dataset, 1))
        if getattr(dataloader, "batch_size", 1) is None:  # the stream makes its own batches; their size must not count
            samples = [[part[0] for part in batch] for batch in samples]
    else:
        about["images"] = len(dataset)
        samples = [dataset[i] for i in sorted({0, len(dataset) // 2, len(dataset) - 1})] if len(dataset) else []
    while isinstance(dataset, Subset):  # a random part, such as --val_proportion makes
        about["rows"] = hashlib.sha256(repr((about.get("rows"), list(dataset.indices))).encode()).hexdigest()
        dataset = dataset.dataset

    stages = getattr(dataset, "pipeline", [])  # of a WebDataset
    shards = [url for stage in stages for url in getattr(stage, "urls", [])]
    transforms = [arg for stage in stages for arg in getattr(stage, "args", ()) if callable(arg)]
    about["source"] = [_describe_file(url) for url in shards] or (
        type(dataset).__name__ if isinstance(dataset, (list, tuple)) else _text(dataset))
    about["transform"] = [_text(t) for t in transforms] or _text(getattr(dataset, "transform", None))

    digest = hashlib.sha256()
    _hash_sample(digest, samples)
    about["sample"] = digest.hexdigest()
    return about


def cached_features(
        folder: str, key: dict, extract: Callable[[], tuple[torch.Tensor, torch.Tensor]], note: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the features [N, D] and targets [N] of a key from its file, or extracts them and writes the file.

    Two runs may share the folder: a file appears whole or not at all. A file that is damaged is written anew, with a
    warning.

    Args:
        folder: Where the files are; made if missing.
        key: What `cache_key` returns.
        extract: Computes features and targets.
        note: Words for whoever reads the file's metadata; not part of the key.
    """
    os.makedirs(folder, exist_ok=True)  # before the long work, so that a folder that cannot be written fails early
    path = feature_path(folder, key)
    found = None
    try:
        found = load_features(path, key)
    except FileNotFoundError:
        pass  # the ordinary miss
    except ValueError as error:
        warnings.warn(f"{error}; extracting these features again", stacklevel=2)
    if everywhere(found is not None):  # processes extract together or not at all
        return found
    features, targets = extract()
    save_features(path, key, features, targets, note)
    return features, targets


def feature_path(folder: str, key: dict) -> str:
    """Returns the file of a key: its split, and a hash of all of it."""
    return os.path.join(folder, f"{key['split']}-{hashlib.sha256(_json(key).encode()).hexdigest()[:24]}.safetensors")


def save_features(path: str, key: dict, features: torch.Tensor, targets: torch.Tensor, note: str = "") -> None:
    """Writes features [N, D] and targets [N] with their key and a checksum; the file appears whole or not at all."""
    tensors = {"features": features.contiguous(), "targets": targets.contiguous()}
    save_tensors(path, tensors, {"key": _json(key), "checksum": _checksum(tensors), "note": note})


def load_features(path: str, key: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads features [N, D] and targets [N].

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or holds something else.
    """
    # Read in one go: safe_open opens the file twice, and in between another run may have put a new one in its place.
    with open(path, "rb") as file:
        data = file.read()
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error})") from error
    header_size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8:8 + header_size]).get("__metadata__", {})
    # The format itself would not notice a flipped bit, nor a file under a wrong name.
    if tensors.keys() != {"features", "targets"} or metadata.get("checksum") != _checksum(tensors):
        raise ValueError(f"{path} is damaged (its checksum is wrong)")
    if metadata.get("key") != _json(key):
        raise ValueError(f"{path} holds features of something else")
    return tensors["features"], tensors["targets"]


def save_tensors(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes a safetensors file under a name of its own, then renames it: a reader never sees half a file."""
    with new_file(path) as partial:
        save_file(tensors, partial, metadata=metadata)


def _json(value: dict) -> str:
    return json.dumps(value, sort_keys=True)


def _text(value: object) -> str:
    """Returns an object as Python prints it, without memory addresses, which differ from run to run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _describe_file(url: str) -> str:
    if not os.path.exists(url):
        return url  # a web address or a pipe
    status = os.stat(url)
    return f"{os.path.abspath(url)}, {status.st_size} bytes, {status.st_mtime_ns}"


def _hash_sample(digest, sample: object) -> None:
    if isinstance(sample, (tuple, list)):
        for part in sample:
            _hash_sample(digest, part)
    elif isinstance(sample, torch.Tensor):
        hash_tensor(digest, sample)
    else:
        digest.update(_text(sample).encode())


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        hash_tensor(digest, tensors[name])
    return digest.hexdigest()
