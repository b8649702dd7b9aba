"""Models that are in neither paper. Each adds itself to tables that any plug-in may use, and nothing else names them.

A model's file is imported only once a config asks for it.

    regions       tiles of an image through one tower
    contrastive   CLIP's loss beside the captions'
    lit           CLIP's text tower on a captioner's image tower
    two_views     two views of each caption, as objectives
"""
import re
from collections.abc import Callable

from torch import nn

from ..integration import configs, factory
from ..models.towers import AROUND
from . import two_views  # noqa: F401  registers its objectives


def with_contrastive(found: re.Match) -> configs.Readings:
    """Yield what CAPTIONER-contrastive0.5 may mean: any captioner with CLIP's loss added at a weight, 1 by default."""
    weight = float(found[2] or 1)
    for base, caption_cfg in configs.readings(found[1]) if weight else ():
        yield base, {**caption_cfg, "contrastive_weight": weight}


def lit_config(name: str, base_config: Callable[[str], dict | None]) -> dict | None:
    """Return the config of LiT-BASE: a base's text tower with the image tower of its captioners. Else return None."""
    prefix, _, base = name.replace("/", "-").partition("-")
    config = configs.any_base(base, base_config) if prefix == "LiT" else None
    if config is None or "caption_cfg" in config or not configs.has_image_tower(config):
        return None
    return {"embed_dim": config.get("embed_dim", 512), "custom_text": True, "image_pool": "gap",
            **{key: config[key] for key in ("vision_cfg", "text_cfg", "quick_gelu") if key in config}}


def class_of(config: factory.Config) -> type[nn.Module] | None:
    if "image_pool" in config:
        from .lit import LiT
        return LiT
    if config.get("caption_cfg", {}).get("contrastive_weight"):
        from .contrastive import OpenCLIPContrastiveCaptioner
        return OpenCLIPContrastiveCaptioner
    return None


def in_regions(visual: nn.Module, caption_cfg: factory.Config) -> nn.Module:
    if (regions := caption_cfg.get("regions", 1)) == 1:
        return visual
    from .regions import RegionTower
    return RegionTower(visual, regions)


configs.PATTERNS.append((rf"(.+)-contrastive({configs.NUMBER})?", with_contrastive))
configs.PROJECTED.add("contrastive_weight")
configs.MAKERS.append(lit_config)
factory.CLASSES.insert(0, class_of)  # before that of any captioner
AROUND.append(in_regions)
