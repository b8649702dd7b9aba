"""Load a checkpoint as the architecture that it was trained as, without asking for its name again.

`open_clip_train` writes RUN/params.txt and RUN/checkpoints/epoch_N.pt. Given the run folder or one of its checkpoints,
`load` builds the model as it was trained. `local-dir:` and `hf-hub:` ids work as in OpenCLIP.
"""
import sys
from pathlib import Path

import open_clip
import torch

from ..data.weights import Misfit, tensors
from ..errors import close_names
from ..objectives.config import CaptionCfg
from .patches import register
from .runs import checked_settings, find, params_file, without_settings


def objective(model_name: str) -> str:
    """Return the `caption_cfg.objective` of a captioner's config."""
    return CaptionCfg(**open_clip.get_model_config(model_name)["caption_cfg"]).objective


def check_length(flag: str, tokens: object, pretrained: str, model_name: str | None = None) -> None:
    """Raise ValueError for a number of tokens that the context in the model's config does not hold, before it loads."""
    if not isinstance(tokens, int):
        return
    register()
    name, _, args = find(pretrained, model_name)
    config = None if name.startswith("hf-hub:") else open_clip.get_model_config(name)
    if config is None:  # `load` says what it lacks
        return
    longest = args.get("force_context_length") or config["text_cfg"].get("context_length", 77)
    # A run's params.txt may hold any text, which `load` refuses.
    if isinstance(longest, int) and tokens > longest - 2:
        raise ValueError(f"{flag} {tokens} is more than this model's context holds: give 1 to {longest - 2} tokens")


def load(pretrained: str, model_name: str | None = None, device: str = "cpu", precision: str = "fp32",
         captioner: bool = False, cache_dir: str | None = None):
    """Return a model in eval mode, its image transform and its tokenizer.

    `captioner=True` refuses any other model before it is built. `cache_dir` is where downloads from the hub are kept.
    Raises FileNotFoundError if there is no checkpoint, and ValueError if it belongs to another model. Both say why in
    one line.
    """
    register()
    name, weights, args = find(pretrained, model_name)
    own = ":" not in name  # otherwise the config lies beside the weights
    if own and open_clip.get_model_config(name) is None:
        close = close_names(name, open_clip.list_models())
        raise ValueError(f"--model {name} is not known{close}" if name == model_name else
                         f"{pretrained} was trained as {name}, which is not a known model{close}")
    check_device(device)
    try:
        config = open_clip.get_model_config(name)  # raises for one from elsewhere that refers to other places
        if captioner and "caption_cfg" not in config:
            raise ValueError(f"--model {name} is no captioner" if name == model_name else
                             f"{pretrained} is no captioner, but {name}")
        # For local-dir: and hf-hub: OpenCLIP loads the weights beside the config, whatever file is given.
        later = weights is not None and not own
        model, _, transform = open_clip.create_model_and_transforms(
            name, weights if own else None, device=device, precision=precision, output_dict=True, cache_dir=cache_dir,
            load_weights=not later, pretrained_text=False, require_pretrained=not later, **args)
        if later:
            open_clip.load_checkpoint(model, weights)
        tokenizer = open_clip.get_tokenizer(name, context_length=args.get("force_context_length"), cache_dir=cache_dir)
        if captioner and weights and config.get("vq_cfg") and all(
                weight.startswith("visual.vq.") for weight in tensors(Path(weights))):
            raise ValueError(f"{weights} is a frozen VQ-VAE alone: train a captioner with --pretrained {weights} first")
    except Exception as problem:  # of any kind, as a config may hold any value
        if name.startswith("hf-hub:") and weights is None:
            what = f"{name} cannot be loaded from the Hugging Face hub"
        elif args and not isinstance(problem, (Misfit, OSError)) and str(weights) not in str(problem):
            what = f"{name} cannot be built with the settings in {params_file(Path(weights))}"
        elif isinstance(problem, ValueError) or isinstance(problem, OSError) and weights is None:
            raise
        else:
            what = f"{pretrained} holds no weights of {name}"
        raise ValueError(f"{what}: {first_lines(problem)}") from problem
    if own and not args and (said := without_settings(weights, name)):
        print(f"warning: {said}", file=sys.stderr)
    checked_settings({name: model.visual.preprocess_cfg[name] for name in ("mean", "std")}, pretrained)
    return model.eval(), transform, tokenizer


def default_device(device: str | None = None) -> str:
    """Return the given device, by default cuda if there is one, else cpu. Raises ValueError if it cannot be used."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    return device


def check_device(device: str) -> None:
    """Raise ValueError if there is no such device."""
    try:
        torch.device(device)
    except RuntimeError as problem:  # its text lists 21 kinds of devices
        raise ValueError(f"{device} is no device: give cpu, cuda, cuda:1 or mps") from problem
    try:
        torch.empty(1, device=device).item()  # a meta tensor has none
    except (RuntimeError, AssertionError, ImportError) as problem:
        raise ValueError(f"{device} cannot be used here: {first_lines(problem)}") from problem


def first_lines(problem: Exception) -> str:
    """Return the reason of an exception in one line of some 200 characters. PyTorch lists all keys that misfit."""
    text = f"it is damaged ({problem.strerror.lower()})" if getattr(problem, "strerror", None) else str(problem)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(problem).__name__]
    line = lines[1] if lines[0].startswith("Error(s) in loading") and len(lines) > 1 else lines[0]
    return line if len(line) < 200 else f"{line[:200]}..."
