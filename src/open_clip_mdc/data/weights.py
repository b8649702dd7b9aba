"""Read weights of any format: check the file, then return tensors under the names that the model itself gives them.

Formats are torch.save's zip and older pickle, safetensors and big_vision's .npz, told by content. PyTorch does not
compare the checksums of a zip, nor safetensors the SHA-256 that `save` writes to its header. This file compares both,
as a changed bit would be another weight.
"""
import errno
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from warnings import catch_warnings, simplefilter
from zipfile import ZipFile

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from .files import AnyPath, check_readable, new_file

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")  # keys under which checkpoints hold the weights
PREFIXES = ("module.", "model.")  # in front of all names, from DDP and Lightning
WITHIN = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # from torch.compile and FSDP
DIGEST = "sha256"  # key in a safetensors header
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = re.compile(r"^$|(num_batches_tracked|ids|idxs?|index|indices|mask|used)$")  # names of what is no weight
Tensors = dict[str, Tensor]  # by name
Metadata = Mapping[str, str] | None  # in the header of a safetensors file


class Misfit(RuntimeError):
    """Weights do not belong to a model. The text follows after "FILE holds no weights of MODEL: "."""


def check(path: Path) -> str:
    """Return the format of a file of weights: "torch", "safetensors" or "npz". Raises ValueError if none or damaged."""
    check_readable(path)
    with path.open("rb") as file:
        start = file.read(512)
    if start[:2] == b"PK":
        return _check_zip(path)
    if start[8:9] == b"{" and 0 in start[:8]:  # a text would have no zero bytes before the brace
        _open_safetensors(path)
        return "safetensors"
    if start[:1] == b"\x80":
        return "torch"
    what = f"it begins with {start[:24]!r}" if start else "it is empty"
    raise ValueError(f"{path} is no checkpoint that torch.save or safetensors has written: {what}")


def _check_zip(path: Path) -> str:
    try:
        with ZipFile(path) as archive:
            names, damaged = archive.namelist(), archive.testzip()
    except Exception as problem:  # zipfile fails in many ways on damaged files
        raise ValueError(f"{path} is damaged or was cut off ({problem}): copy or make it again") from problem
    if damaged:
        raise ValueError(f"{path} is damaged (the checksum of {damaged} is wrong): copy or make it again")
    within = {name.partition("/")[2] for name in names}
    if "data.pkl" in within and "constants.pkl" not in within:
        return "torch"
    if all(name.endswith(".npy") for name in names):
        return "npz"
    raise ValueError(f"{path} is no checkpoint but another zip file, such as a TorchScript program: give the "
                     "state_dict of its model, as torch.save writes it")


def _open_safetensors(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, "pt") as file:  # checks the sizes of all tensors against that of the file
            return file.metadata() or {}
    except (SafetensorError, ValueError) as problem:
        raise ValueError(f"{path} is damaged or was cut off ({problem}): copy or make it again") from problem


def read(path: Path) -> object:
    """Load a file of torch.save, safetensors or big_vision. Raises ValueError if it is damaged or contains code."""
    kind = check(path)
    if kind == "npz":
        return _arrays(path)
    if kind == "safetensors":
        tensors = load_file(path)
        expected = _open_safetensors(path).get(DIGEST)
        if expected is not None and expected != digest(tensors):
            raise ValueError(f"{path} is damaged (the checksum in its header is wrong): copy or make it again")
        return tensors
    with path.open("rb") as file:  # given a path, torch.load would look at the name
        return unpickled(lambda: torch.load(file, map_location="cpu", weights_only=True), path)


def _arrays(path: Path) -> Tensors:
    with np.load(path, allow_pickle=False) as archive:
        if not any("/" in name for name in archive.files):
            raise ValueError(f"{path} is no checkpoint of PyTorch or big_vision: it is a NumPy archive")
        try:
            return {name: torch.from_numpy(archive[name]) for name in archive.files}
        except (ValueError, TypeError) as problem:  # objects, which would have to be unpickled, and other types
            raise ValueError(f"{path} holds other arrays than weights: {problem}") from problem


def unpickled(load: Callable[[], object], path: AnyPath) -> object:
    """Return load(), a call of torch.load. Raises ValueError for a damaged file, or one with other Python objects."""
    try:
        with catch_warnings():  # about pickle protocols
            simplefilter("ignore")
            return load()
    except FileNotFoundError:
        raise
    except Exception as problem:  # damaged bytes raise any kind. PyTorch's own text tells how to run hostile code
        if found := re.search(r"nsupported (?:global: )?GLOBAL (\S+)", str(problem)):
            raise ValueError(f"{path} holds other Python objects than tensors ({found[1]}), which could run code when "
                             "they are read: give its state_dict alone") from None
        raise ValueError(f"{path} is no checkpoint of PyTorch, or is damaged or was cut off: copy or make it again"
                         ) from None


def stored_epoch(path: Path) -> int | None:
    """Return the epoch that a checkpoint stores, 0 if none, None if it cannot be read. Does not read the tensors."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # of any kind, as in `unpickled`
        return None
    epoch = content.get("epoch") if isinstance(content, Mapping) else None
    return epoch if type(epoch) is int else 0


def tensors(path: Path) -> Tensors:
    """Return the weights in a file, under the names that the model itself gives them.

    Raises ValueError as `read` does, for NaN and infinity, and for weights of a type that cannot hold them, such as
    int8. Raises Misfit if there are no weights in it.
    """
    return state_dict(read(path), path)


def state_dict(content: object, path: Path) -> Tensors:
    """Return the weights in the content of a file, as `tensors` does."""
    if not isinstance(content, Mapping):
        raise Misfit(f"it holds a {type(content).__name__}, not tensors by name")
    while inner := [x for key in WRAPPERS if isinstance(x := content.get(key), Mapping)]:
        content = inner[0]
    found = bare_names({name: x for name, x in content.items() if isinstance(x, Tensor)})
    if not found:
        raise Misfit("it holds only the state of an optimizer" if {"param_groups", "optimizer"} & content.keys() else
                     "it holds no tensor")
    check_finite(found, path)
    for name, x in found.items():
        if x.dtype not in FLOATS and not (WHOLE.search(name) or x.ndim == 0 and "logit" not in name):
            raise wrong_type(x, path, name)
    return found


def bare_names(weights: Tensors) -> Tensors:
    """Return weights without the prefixes that DDP, torch.compile, Lightning and others add to their names."""
    weights = {WITHIN.sub("", str(name)): x for name, x in weights.items()}
    while prefix := next((p for p in PREFIXES if weights and all(name.startswith(p) for name in weights)), None):
        weights = {name.removeprefix(prefix): x for name, x in weights.items()}
    return weights


def check_finite(content: object, path: Path, name: str = "") -> None:
    """Raise ValueError if a tensor in the content of a file is not finite, or of a type that no weight has."""
    if isinstance(content, Tensor):
        if content.layout != torch.strided or content.dtype not in FLOATS and (
                content.is_floating_point() or content.is_complex()):
            raise wrong_type(content, path, name)
        if content.is_floating_point() and not content.isfinite().all():
            raise ValueError(f"{path} holds NaN or infinity ({name}): give an earlier checkpoint")
    elif isinstance(content, (Mapping, list, tuple)):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            check_finite(value, path, f"{name}.{key}" if name else str(key))


def wrong_type(x: Tensor, path: Path, name: str) -> ValueError:
    kind = str(x.dtype if x.layout == torch.strided else x.layout).removeprefix("torch.")
    return ValueError(f"{path} holds {name} as {kind}, from which the weight cannot be "
                      "told: give weights in float16, bfloat16, float32 or float64")


def save(tensors: Tensors, path: Path, metadata: Metadata = None) -> None:
    """Write a safetensors file with the checksum in its header that `read` compares."""
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    _save(tensors, path, {"format": "pt", **(metadata or {}), DIGEST: digest(tensors)}, path)


def save_tensors(path: AnyPath, tensors: Tensors, metadata: Metadata = None) -> None:
    """Write a safetensors file that appears once it is complete. Raises OSError that names it."""
    with new_file(path) as partial:
        _save(tensors, partial, metadata, path)


def _save(tensors: Tensors, path: Path, metadata: Metadata, shown: AnyPath) -> None:
    try:
        save_file(tensors, path, metadata)
    except (OSError, SafetensorError) as problem:
        raise OSError(errno.EIO, f"cannot be written: {problem}", str(shown)) from problem


def add_checksum(path: Path) -> None:
    """Write a safetensors file again, with a checksum in its header."""
    save(load_file(path), path, _open_safetensors(path))


def halve(path: Path) -> None:
    """Convert the floats in a safetensors file to float16. Raises ValueError if one is above 65,504."""
    tensors = {name: x.half() if x.is_floating_point() else x for name, x in load_file(path).items()}
    check_finite(tensors, path)
    save(tensors, path, _open_safetensors(path))


def digest(tensors: Tensors) -> str:
    """Return the SHA-256 of the names, types, shapes and values of tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode())
        hash_tensor(total, tensor)
    return total.hexdigest()


def hash_tensor(digest, tensor: Tensor) -> None:
    """Add the type, shape and values of a tensor to a hash of hashlib."""
    flat = tensor.detach().cpu().contiguous()
    digest.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
    digest.update(flat.reshape(-1).view(torch.uint8).numpy())


def difference(own: Tensors, given: Tensors) -> str:
    """Return how given weights differ from a model's own, by the first other shape or else by names, "" if neither."""
    for name, x in own.items():
        if name in given and given[name].shape != x.shape:
            return f"its {name} is {list(given[name].shape)}, here {list(x.shape)}"
    missing = [name for name in own if name not in given]
    extra = [name for name in given if name not in own]
    return ", ".join(f"{words} {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1)
                     for words, names in (("it lacks", missing), ("it has too much", extra)) if names)


def misfit(own: Tensors, given: Tensors) -> Misfit:
    """Return why given weights do not fit a model (`difference`)."""
    if own.keys() & given.keys():
        return Misfit(f"{difference(own, given)}. Give the model that it was trained as")
    return Misfit(f"it has other names, such as {min(given, default='none')}. Give the checkpoint of such a model, or "
                  "start its image tower alone by open_clip_train --pretrained-image")
