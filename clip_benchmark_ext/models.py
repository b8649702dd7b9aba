"""Load the model of --model and --pretrained: captioners as they were trained, others as clip_benchmark does."""
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
from clip_benchmark import models as upstream

from open_clip_mdc.errors import close_names
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.integration.configs import is_captioner
from open_clip_mdc.integration.patches import register
from open_clip_mdc.models.foreign.base import ForeignCaptioner
from open_clip_mdc.objectives.registry import OBJECTIVES

from .foreign import HF, as_captioner, load_hf, scorers

DEFAULT_PRETRAINED = "laion400m_e32"  # clip_benchmark's


def is_encoder(model: str) -> bool:
    """Return whether --model is timm-NAME, an image encoder alone."""
    return model.startswith("timm-")


def resolve(model: str, pretrained: str) -> tuple[str, str]:
    """Return the architecture and the checkpoint (a file, or an id such as hf-hub:) of --model and --pretrained."""
    if is_encoder(model):
        return model, pretrained
    if model.startswith(HF):
        return model, model.removeprefix(HF)
    alias = model.lower() if model.lower() in OBJECTIVES else None
    if not alias and not is_captioner(model):
        is_run = Path(pretrained, "checkpoints").is_dir()
        return model, checkpoints.find(pretrained, model).weights if is_run else pretrained
    if pretrained == DEFAULT_PRETRAINED:
        raise ValueError(f"--model {model} needs --pretrained: a checkpoint, a run folder, local-dir:DIR or hf-hub:ID")
    name, weights, _ = checkpoints.find(pretrained, None if alias else model)
    if not is_captioner(name):
        raise ValueError(f"{pretrained} is a checkpoint of {name}, which is no captioner: give --model {name}")
    if alias not in (None, checkpoints.objective(name)):
        raise ValueError(f"{pretrained} is a checkpoint of {name}, not {alias.upper()}: give --model {name}")
    return name, weights or name


def load_model(args: Namespace) -> tuple[torch.nn.Module, Callable, Callable]:
    if args.skip_load:
        raise ValueError("--skip_load cannot find features, which are cached by the model's content: leave it out")
    if args.model.startswith(HF):
        return load_hf(args.model, args.device)
    if is_captioner(args.model):
        return checkpoints.load(args.pretrained, None if ":" in args.model else args.model, device=args.device,
                                captioner=True)
    if is_encoder(args.model):
        raise ValueError(f"--model {args.model} is an image encoder alone: give --task linear_probe, probe or "
                         "segmentation")
    named = args.model_type == "open_clip"
    if named and ":" not in args.model and open_clip.get_model_config(args.model) is None:
        raise ValueError(f"--model {args.model} is no model known here"
                         f"{close_names(args.model, open_clip.list_models())}")
    # clip_benchmark does not know a run's --force-image-size and other image flags. It would silently resize the
    # positional embedding of a checkpoint file to the config's image size.
    if named and ":" in args.model:
        model, transform, tokenizer = checkpoints.load(args.model, device=args.device, cache_dir=args.model_cache_dir)
    elif named and os.path.exists(args.pretrained):
        model, transform, tokenizer = checkpoints.load(args.pretrained, args.model, device=args.device)
    else:
        model, transform, tokenizer = upstream.load_clip(
            args.model_type, args.model, args.pretrained, args.model_cache_dir, device=args.device)
    if "nllb-clip" in args.model:
        from clip_benchmark.models.nllb_clip import set_language
        set_language(tokenizer, args.language)
    return model.eval(), transform, tokenizer


def load_foreign(model: str | None, pretrained: str, device: str) -> tuple[ForeignCaptioner, Callable, Any] | None:
    """Return another project's captioner in eval mode, its transform and its tokenizer, or None for any other model.

    `model` and `pretrained` are as for `clip_benchmark eval`. Raises ValueError or OSError if it cannot be loaded.
    """
    register()
    name = model or checkpoints.find(pretrained).model_name
    if not scorers(name):
        return None
    name, weights = resolve(name, pretrained)
    try:
        loaded, transform, tokenizer = load_model(Namespace(
            model=name, pretrained=weights, device=device, model_type="open_clip", model_cache_dir=None,
            skip_load=False))
    except RuntimeError as problem:  # OpenCLIP's, about a tag that it does not know
        raise ValueError(f"--model {name}: {checkpoints.first_lines(problem)}") from problem
    captioner, tokenizer = as_captioner(loaded, tokenizer, name)
    return captioner, transform, tokenizer
