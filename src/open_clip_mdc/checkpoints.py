"""Finds the architecture that belongs to a checkpoint, so that nobody has to repeat it.

A run of `open_clip_train` leaves RUN/params.txt and RUN/checkpoints/epoch_N.pt: given the run folder or one of its
checkpoints, `load` makes the model as it was trained. `local-dir:` and `hf-hub:` ids work as in OpenCLIP.
"""
import ast
import hashlib
import math
import sys
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from .integration import is_captioner, register
from .messages import close_names
from .weights import Misfit, hash_tensor, is_vq, stored_epoch, tensors

# What params.txt holds that decides how the model and its preprocessing are made (create_model_and_transforms).
MODEL_ARGS = ("force_quick_gelu", "force_custom_text", "force_image_size", "force_context_length", "image_mean",
              "image_std", "image_interpolation", "image_resize_mode")
MOST_PARAMS, MOST_LITERAL = 1_000_000, 100  # characters of params.txt, and of a value there, that are read
# What OpenCLIP looks for in a folder. A file of another name is not known to be the weights.
WEIGHTS_FILES = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin",
                 "open_clip_pytorch_model.pth", "model.safetensors", "pytorch_model.bin", "pytorch_model.pth",
                 "model.pth")
SIGLIP_ARGS = {"init_logit_scale": math.log(10), "init_logit_bias": -10}  # as open_clip_train.main has them


class Checkpoint(NamedTuple):
    """A model config's name, its weights, and the arguments that the run gave beside them (`find`)."""

    model_name: str
    weights: str | None  # None for a schema id, which names its own
    model_args: dict


def latest_checkpoint(folder: Path) -> Path:
    """Return the epoch_*.pt that stores the highest epoch, whatever it is called and whenever it was written.

    An epoch_latest.pt (--save-most-recent) may be of a session before the last. Where that, or the highest number, is
    passed over, a line says so.

    Raises:
        FileNotFoundError: there is none.
    """
    found = sorted(filter(Path.is_file, folder.glob("epoch_*.pt")))
    if not found:
        raise FileNotFoundError(f"{folder} has no epoch_*.pt: give a checkpoint file or a run of open_clip_train")
    return _latest(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in found))


@lru_cache  # one line a process
def _latest(found: tuple[tuple[Path, int, int], ...]) -> Path:
    paths = [path for path, _, _ in found]

    def by_name(path: Path) -> tuple[bool, int]:
        return path.stem == "epoch_latest", int(path.stem[6:]) if path.stem[6:].isdecimal() else -1
    expected = max(paths, key=by_name)
    epochs = {path: stored_epoch(path) for path in paths} if len(paths) > 1 else {}
    readable = [path for path in paths if epochs.get(path) is not None] or [expected]
    best = max(readable, key=lambda path: (epochs.get(path) or 0, by_name(path)))
    over = [f"{path.name} ({'cannot be read' if epochs[path] is None else f'epoch {epochs[path]}'})" for path in epochs
            if path != best and (path == expected or epochs[path] is None)]
    if over:
        # Not by logging, which OpenCLIP sets up only later.
        print(f"warning: {best} is taken (epoch {epochs[best]}); passed over: {', '.join(over)}", file=sys.stderr)
    return best


def params_file(checkpoint: Path) -> Path:
    """Where the params.txt of a checkpoint's run is, if it is of one. A link belongs to the run that it stands in."""
    return checkpoint.absolute().parent.parent / "params.txt"


def read_params(path: Path) -> dict[str, str]:
    """`name: value` lines of the params.txt that open_clip_train writes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        pairs = (line.split(": ", 1) for line in file.read(MOST_PARAMS).splitlines() if ": " in line)
        return dict(pairs)


def literal(text: str):
    """A number, list or None written by str(); any other text is itself. Evaluates nothing."""
    try:
        return ast.literal_eval(text) if len(text) <= MOST_LITERAL else text  # a longer one could nest too deeply
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
        check_folder(pretrained)
        return Checkpoint(pretrained, None, {})
    path = Path(pretrained)
    if not path.exists():
        raise FileNotFoundError(f"no checkpoint at {pretrained}: give a file, a run folder, local-dir:DIR or hf-hub:ID")
    if (path / "open_clip_config.json").exists():
        return find(f"local-dir:{path}")
    if path.is_dir() and (path / "config.json").exists():
        raise ValueError(f"{path} is a folder for timm or transformers, with the image encoder alone: give the run, or "
                         f"the folder that export --to open_clip wrote")
    if path.is_dir():
        named = path if path.name else path.absolute()  # "."
        path = latest_checkpoint(path if named.name == "checkpoints" else path / "checkpoints")
    params = params_file(path)
    if params.exists():
        values = read_params(params)
        if not (model_name or values.get("model")):
            raise ValueError(f"{params} names no model: give --model too")
        if not model_name and ":" in values["model"]:  # a place to load from, which only the user may name
            raise ValueError(f"{params} says {values['model'][:80]!r} where the name of a model should be: where you "
                             "trust that, give it by --model")
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


def check_folder(model_name: str) -> None:
    """Raise FileNotFoundError if a local-dir: has no weights by a known name: OpenCLIP would draw some at random."""
    scheme, _, place = model_name.partition(":")
    if scheme == "local-dir" and not any((Path(place) / name).is_file() for name in WEIGHTS_FILES):
        raise FileNotFoundError(f"{place} has no weights ({WEIGHTS_FILES[0]}): copy or export it again")


def longest_caption(pretrained: str, model_name: str | None = None) -> float:
    """Return how many tokens a caption has at most between SOT and EOT, by the config; infinity where `load` will say.

    Raises:
        FileNotFoundError, ValueError: as `find`.
    """
    register()
    import open_clip
    name, _, args = find(pretrained, model_name)
    config = None if name.startswith("hf-hub:") else open_clip.get_model_config(name)
    if config is None:
        return math.inf
    return (args.get("force_context_length") or config["text_cfg"].get("context_length", 77)) - 2


def load(pretrained: str, model_name: str | None = None, device: str = "cpu", precision: str = "fp32",
         captioner: bool = False, cache_dir: str | None = None):
    """Model in eval mode, its image transform and its tokenizer.

    Args:
        captioner: refuse another model, before it is built.
        cache_dir: of what comes from the hub.

    Raises:
        FileNotFoundError, ValueError: as `find`; ValueError too, in one line, if the weights are of another model.
    """
    register()
    import open_clip
    name, weights, args = find(pretrained, model_name)
    own = ":" not in name  # else the config is not OpenCLIP's or ours
    if own and open_clip.get_model_config(name) is None:
        close = close_names(name, open_clip.list_models())
        raise ValueError(f"--model {name} is not known{close}" if name == model_name else
                         f"{pretrained} was trained as {name}, which is no model known here{close}")
    check_device(device)
    try:
        if not own:
            open_clip.get_model_config(name)  # refuses what leads elsewhere
        if captioner and not is_captioner(name):
            raise ValueError(f"--model {name} is no captioner" if name == model_name else
                             f"{pretrained} is no captioner, but {name}")
        # OpenCLIP gives a config with a scheme the weights beside it, whatever file is given.
        later = weights is not None and not own
        model, _, transform = open_clip.create_model_and_transforms(
            name, weights if own else None, device=device, precision=precision, output_dict=True, cache_dir=cache_dir,
            load_weights=not later, pretrained_text=False, require_pretrained=not later, **args)
        if later:
            open_clip.load_checkpoint(model, weights)
        tokenizer = open_clip.get_tokenizer(name, context_length=args.get("force_context_length"), cache_dir=cache_dir)
        if captioner and weights and open_clip.get_model_config(name).get("vq_cfg") and is_vq(tensors(Path(weights))):
            raise ValueError(f"{weights} is a frozen VQ-VAE alone: train a captioner with --pretrained {weights} first")
    except (RuntimeError, LookupError, AttributeError, TypeError, AssertionError, OSError, ValueError, ArithmeticError,
            MemoryError) as problem:  # a config may hold any value
        if name.startswith("hf-hub:") and weights is None:
            raise ValueError(f"{name} cannot be had from the Hugging Face hub: {first_lines(problem)}") from problem
        if args and not isinstance(problem, (Misfit, OSError)) and str(weights) not in str(problem):
            raise ValueError(f"{params_file(Path(weights))} has settings of which no {name} can be made: "
                             f"{first_lines(problem)}") from problem
        if isinstance(problem, ValueError) or isinstance(problem, OSError) and weights is None:
            raise
        raise ValueError(f"{pretrained} holds no weights of {name}: {first_lines(problem)}") from problem
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


def first_lines(problem: Exception) -> str:
    """The reason in one line: of a state dict that does not fit, the first of its lists, cut."""
    text = f"it is damaged ({problem.strerror.lower()})" if getattr(problem, "strerror", None) else str(problem)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(problem).__name__]
    if lines[0].startswith("Error(s) in loading") and len(lines) > 1:
        lines = lines[1:]
    return lines[0] if len(lines[0]) < 200 else f"{lines[0][:200]}..."


def is_of_weights(problem: Exception) -> bool:
    """Whether it was raised as a checkpoint holds the weights of another model."""
    return isinstance(problem, Misfit) or "Error(s) in loading state_dict" in str(problem)


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


def _is_plain(value: object) -> bool:
    if is_dataclass(value):  # caption_cfg
        return all(map(_is_plain, vars(value).values()))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
