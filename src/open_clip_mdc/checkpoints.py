"""Finds the architecture that belongs to a checkpoint, so that nobody has to repeat it.

A run of `open_clip_train` leaves RUN/params.txt and RUN/checkpoints/epoch_N.pt: given the run folder or one of its
checkpoints, `load` makes the model as it was trained. `local-dir:` and `hf-hub:` ids work as in OpenCLIP.
"""
import ast
import hashlib
import math
import re
import struct
import zlib
from dataclasses import is_dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

import torch

from .integration import register
from .messages import close_names

# What params.txt holds that decides how the model and its preprocessing are made (create_model_and_transforms).
MODEL_ARGS = ("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length", "image_mean",
              "image_std", "image_interpolation", "image_resize_mode")
SIGLIP_ARGS = {"init_logit_scale": math.log(10), "init_logit_bias": -10}  # as open_clip_train.main has them


class Checkpoint(NamedTuple):
    """A model config's name, its weights, and the arguments that the run gave beside them (`find`)."""

    model_name: str
    weights: str | None  # None for a schema id, which names its own
    model_args: dict


def latest_checkpoint(run: Path) -> Path:
    """The newest epoch of RUN/checkpoints: epoch_latest.pt (--save-most-recent), else the highest number.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = run / "checkpoints"
    latest = folder / "epoch_latest.pt"
    if latest.exists():
        return latest
    numbered = {int(m[1]): p for p in folder.glob("epoch_*.pt") if (m := re.fullmatch(r"epoch_(\d+)", p.stem))}
    if not numbered:
        raise FileNotFoundError(f"{folder} has no epoch_*.pt: give a checkpoint file or a run of open_clip_train")
    return numbered[max(numbered)]


def params_file(checkpoint: Path) -> Path:
    """Where the params.txt of a checkpoint's run is, if it is of one. A link belongs to the run that it stands in."""
    return checkpoint.absolute().parent.parent / "params.txt"


def read_params(path: Path) -> dict[str, str]:
    """`name: value` lines of the params.txt that open_clip_train writes."""
    pairs = (line.split(": ", 1) for line in path.read_text(encoding="utf-8").splitlines() if ": " in line)
    return dict(pairs)


def literal(text: str):
    """A number, list or None written by str(); any other text is itself. Evaluates nothing."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def find(pretrained: str, model_name: str | None = None) -> Checkpoint:
    """What `pretrained` is a checkpoint of.

    Args:
        pretrained: a checkpoint file, a run folder, a folder with open_clip_config.json, local-dir:DIR or hf-hub:ID.
        model_name: the architecture of a bare checkpoint file; by default params.txt says it.

    Raises:
        FileNotFoundError: nothing there. ValueError: neither `model_name` nor params.txt says what it is of.
    """
    if pretrained.startswith(("local-dir:", "hf-hub:")):
        return Checkpoint(pretrained, None, {})
    path = Path(pretrained)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {pretrained}: give a file, a run folder, local-dir:DIR or hf-hub:ID")
    if (path / "open_clip_config.json").exists():
        return Checkpoint(f"local-dir:{path}", None, {})
    if path.is_dir() and (path / "config.json").exists():
        raise ValueError(f"{path} is a folder for timm or transformers, with the image encoder alone: give the run, or "
                         f"the folder that export --to open_clip wrote")
    if path.is_dir():
        named = path if path.name else path.absolute()  # "."
        path = latest_checkpoint(named.parent if named.name == "checkpoints" else path)
    params = params_file(path)
    if params.exists():
        values = read_params(params)
        if not (model_name or values.get("model")):
            raise ValueError(f"{params} names no model: give --model too")
        args = {name: literal(values[name]) for name in MODEL_ARGS if values.get(name, "None") != "None"}
        if values.get("siglip") == "True":
            args |= SIGLIP_ARGS
        return Checkpoint(model_name or values["model"], str(path), args)
    if model_name is None:
        raise ValueError(f"{path} is in no run folder (there is no {params}): give --model too")
    return Checkpoint(model_name, str(path), {})


def objective(model_name: str) -> str:
    """The `caption_cfg.objective` of a captioner's config."""
    import open_clip

    from .objective import CaptionCfg
    return CaptionCfg(**open_clip.get_model_config(model_name)["caption_cfg"]).objective


def load(pretrained: str, model_name: str | None = None, device: str = "cpu", precision: str = "fp32"):
    """Model in eval mode, its image transform and its tokenizer.

    Raises:
        FileNotFoundError, ValueError: as `find`; ValueError too, in one line, if the weights are of another model.
    """
    register()
    import open_clip
    name, weights, args = find(pretrained, model_name)
    if ":" not in name and open_clip.get_model_config(name) is None:
        close = close_names(name, open_clip.list_models())
        raise ValueError(f"--model {name} is not known{close}" if name == model_name else
                         f"{pretrained} was trained as {name}, which is no model known here{close}")
    check_device(device)
    if weights is not None:
        check_format(Path(weights))
    try:
        model, _, transform = open_clip.create_model_and_transforms(
            name, weights, device=device, precision=precision, output_dict=True, **args)
        tokenizer = open_clip.get_tokenizer(name, context_length=args.get("force_context_length"))
    except (RuntimeError, KeyError, AttributeError, TypeError, EOFError, UnpicklingError, AssertionError, StopIteration,
            OSError, ValueError) as problem:
        if name.startswith("hf-hub:"):
            raise ValueError(f"{name} cannot be had from the Hugging Face hub: {first_lines(problem)}") from problem
        if isinstance(problem, ValueError) or isinstance(problem, OSError) and weights is None:
            raise
        raise ValueError(f"{pretrained} holds no weights of {name}: {first_lines(problem)}") from problem
    for key, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{pretrained} holds NaN or infinity ({key}): nothing can be computed with it")
    check_normalization(pretrained, model.visual.preprocess_cfg)
    return model.eval(), transform, tokenizer


def check_normalization(pretrained: str, preprocess_cfg: dict) -> None:
    """Raises ValueError unless images can be normalised by `mean` and `std`.

    PyTorch makes a tensor without elements of ["", 0.5, 0.5], and normalises by 1e39 or 0 to infinity.
    """
    for name in ("mean", "std"):
        given = preprocess_cfg[name]
        values = given if isinstance(given, (list, tuple)) else [given]
        if not (len(values) in (1, 3) and all(type(v) in (int, float) for v in values) and torch.tensor(
                values, dtype=torch.float32).isfinite().all() and (name == "mean" or min(values) > 0)):
            raise ValueError(f"{pretrained}: preprocess_cfg.{name} is {str(given)[:80]} in its config: it should be "
                             "three numbers" + (" above 0" if name == "std" else ""))


def check_device(device: str) -> None:
    """Raises ValueError if there is no such device."""
    try:
        torch.device(device)
    except RuntimeError as problem:  # whose text lists 21 kinds of devices
        raise ValueError(f"{device} is no device: give cpu, cuda, cuda:1 or mps") from problem
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        raise ValueError(f"{device} cannot be used here: {first_lines(problem)}") from problem


def check_format(path: Path) -> None:
    """Raises ValueError if it is no file that torch.save or safetensors writes, or that OpenCLIP reads (.npz).

    Of a zip, as torch.save writes, all checksums are compared: PyTorch does not, and a changed bit is another weight.
    """
    with path.open("rb") as file:
        start = file.read(9)
    pickled, safetensors = start[:1] == b"\x80", start[8:] == b"{"
    if not (start[:2] == b"PK" or pickled or safetensors):
        raise ValueError(f"{path} is no checkpoint: " + ("it is empty" if not start else
                         "neither torch.save nor safetensors wrote it"))
    if start[:2] == b"PK":
        try:
            with ZipFile(path) as archive:
                damaged = archive.testzip()
        except (BadZipFile, NotImplementedError, EOFError, ValueError, OSError, zlib.error, struct.error) as problem:
            raise ValueError(f"{path} is damaged or was cut off ({problem}): copy or make it again") from problem
        if damaged:
            raise ValueError(f"{path} is damaged (the checksum of {damaged} is wrong): copy or make it again")


def first_lines(problem: Exception) -> str:
    """The reason in one line: of a state dict that does not fit, the first of its lists, cut."""
    if isinstance(problem, StopIteration):  # OpenCLIP looks at the name of the first tensor
        return "it holds no tensor"
    text = f"it is damaged ({problem.strerror.lower()})" if getattr(problem, "strerror", None) else str(problem)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(problem).__name__]
    if lines[0].startswith("Error(s) in loading") and len(lines) > 1:
        lines = lines[1:]
    return lines[0] if len(lines[0]) < 200 else f"{lines[0][:200]}..."


def is_of_weights(problem: Exception) -> bool:
    """Whether PyTorch or OpenCLIP raised it as a checkpoint is none, or holds the weights of another model."""
    return isinstance(problem, (UnpicklingError, StopIteration)) or any(words in str(problem) for words in (
        "Error(s) in loading state_dict", "Expected state_dict to be dict-like", "object has no attribute 'items'"))


def fingerprint(model: torch.nn.Module) -> str:
    """The SHA-256 of a model's weights and settings.

    The weights alone do not decide what a model says: those of ViT-B-32 fit ViT-B-32-quickgelu. So the kinds of modules
    and their plain attributes (number of heads, pooling, the images' mean and size) count as well.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if k != "training" and _is_plain(v)}
        digest.update(f"{name} {type(module).__name__} {sorted(settings.items())}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode())
            hash_tensor(digest, tensor)
    return digest.hexdigest()


def hash_tensor(digest, tensor: torch.Tensor) -> None:
    """Adds type, shape and bytes."""
    flat = tensor.detach().cpu().contiguous()
    digest.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
    digest.update(flat.reshape(-1).view(torch.uint8).numpy())


def _is_plain(value: object) -> bool:
    if is_dataclass(value):  # caption_cfg
        return all(map(_is_plain, vars(value).values()))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
