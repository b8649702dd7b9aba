"""Load the image tower to probe, with all its patch tokens, and the same architecture untrained.

--model and --pretrained name a captioner, a CLIP model, or an image encoder alone, timm-NAME with weights of timm or
transformers.
"""
from argparse import Namespace
from typing import NamedTuple

import open_clip
import timm
import torch
from open_clip.model import CLIPVisionCfg
from open_clip.transform import PreprocessCfg, image_transform_v2
from open_clip.transformer import QuickGELU
from torch import nn

from open_clip_mdc.errors import close_names
from open_clip_mdc.integration import configs, image_source
from open_clip_mdc.models import tower_weights
from open_clip_mdc.models import towers as of_models
from open_clip_mdc.models.captioner import Captioner

from .features import default_feature
from .models import DEFAULT_PRETRAINED, is_encoder, load_model


class Towers(NamedTuple):
    """A trained image tower and an untrained one of the same architecture, in eval mode, and their preprocessing."""

    trained: nn.Module
    untrained: nn.Module
    preprocess: PreprocessCfg
    feature: str  # the feature to probe by default, "gap" or "cls"


def build(config: dict, image_size: int | tuple[int, int] | None, quick_gelu: bool) -> nn.Module:
    vision = config["vision_cfg"] | ({"image_size": image_size} if image_size else {})
    return of_models.build(CLIPVisionCfg(**vision), quick_gelu, vq_cfg=config.get("vq_cfg"),
                           caption_cfg=config.get("caption_cfg")).eval()


def load(args: Namespace, image_size: int | None) -> Towers:
    """Return the image towers of --model and --pretrained. Raises ValueError that names the flag to change."""
    if is_encoder(args.model):
        config, trained, preprocess = _encoder_alone(args, image_size)
        feature = default_feature(trained)
    elif image_size is not None:
        raise ValueError(f"--image_size {image_size} is only for --model timm-NAME: {args.model} has the image size of "
                         "its training")
    elif args.model_type != "open_clip":
        raise ValueError(f"--model_type {args.model_type} cannot be probed: give a captioner, a model of OpenCLIP, or "
                         "timm-NAME")
    else:
        model, _, _ = load_model(args)
        config, given = open_clip.get_model_config(args.model), model.visual
        preprocess = PreprocessCfg(**given.preprocess_cfg)
        feature, trained = "gap", given
        if not isinstance(model, Captioner):  # its tower pools
            trained = build(config, given.image_size, _is_quick(given))
            tower_weights.fill(trained, tower_weights.converted(trained, given.state_dict()))
            feature = default_feature(trained)
    with torch.random.fork_rng():
        torch.manual_seed(args.seed)
        untrained = build(config, of_models.tower(trained).core.image_size, _is_quick(trained))
    return Towers(trained.to(args.device).eval(), untrained.to(args.device), preprocess, feature)


def _is_quick(tower: nn.Module) -> bool:
    return any(isinstance(module, QuickGELU) for module in tower.modules())


def _encoder_alone(args: Namespace, image_size: int | None) -> tuple[dict, nn.Module, PreprocessCfg]:
    name, source = f"MDC-{args.model}", args.pretrained
    config = configs.timm_base(args.model)
    if config is None:
        close = close_names(args.model, (f"timm-{known}" for known in timm.list_models()))
        raise ValueError(f"--model {args.model}: timm has no such encoder{close}")
    if source == DEFAULT_PRETRAINED:
        raise ValueError(f"--model {args.model} needs --pretrained: a file or folder of weights of timm or "
                         f"transformers, or timm:{args.model.removeprefix('timm-')}, which may be downloaded")
    tower = build(config, image_size, False)
    try:
        image_source.load(tower, source, name)
        told = image_source.normalization(source, name)
    except ValueError as problem:
        raise ValueError(str(problem).replace("--pretrained-image", "--pretrained").replace("MDC-", "")) from problem
    return config, tower, PreprocessCfg(size=tower.image_size, **told)


def transform(towers: Towers, whole: bool):
    """Return the model's transform from an image to [3, H, W]. With `whole` it squashes the image, without a crop."""
    return image_transform_v2(PreprocessCfg(**vars(towers.preprocess) | ({"resize_mode": "squash"} if whole else {})),
                              is_train=False)
