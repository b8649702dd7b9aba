"""Image towers: an image becomes normalised patch tokens, what the decoder attends to (Sec. 3.2, Fig. 2).

Everything that depends on the kind of tower stands here. `visual` is OpenCLIP's VisionTransformer, its ModifiedResNet,
its TimmModel, a VQTower, or a RegionTower around one of the first three, as `build` makes it. A checkpoint holds it
under that name.

Dimensions: B images, P patches, D width.
"""
import math
from dataclasses import replace

import torch
from open_clip.model import CLIPVisionCfg, _build_vision_tower
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from torch import Tensor, nn

from . import trunk
from .regions import RegionTower
from .vq import PREFIX, VQCfg, VQTower

FEATURES = ("gap", "cls", "patches")


def build(vision_cfg: CLIPVisionCfg, quick_gelu: bool = False, cast_dtype: torch.dtype | None = None,
          vq_cfg: dict | None = None, regions: int = 1) -> nn.Module:
    """Build a tower that gives all its patch tokens after its last norm and has no parameter beyond what they need.

    Args:
        vq_cfg: makes it a VQTower, with `vision_cfg`'s sizes of images and patches and width.
        regions: g of a RegionTower, whose tiles have `vision_cfg.image_size`; 1 is the tower itself.

    Raises ValueError if the tower gives no tokens, sizes do not fit, or there is no such grid.
    """
    if vq_cfg is not None:
        if regions != 1:
            raise ValueError("caption_cfg.regions is for ViTs; this image tower is a VQ-VAE")
        return VQTower(VQCfg(**vq_cfg), vision_cfg.image_size, vision_cfg.patch_size, vision_cfg.width)
    tokens = dict(output_tokens=True, pool_type="avg", attentional_pool=False, final_ln_after_pool=False,
                  timm_pool="", timm_proj="none")
    try:
        visual = _build_vision_tower(vision_cfg.width, replace(vision_cfg, **tokens), quick_gelu, cast_dtype)
    except (ValueError, TypeError, AssertionError, NotImplementedError) as problem:
        if not vision_cfg.timm_model_name:
            raise
        raise ValueError(f"timm's {vision_cfg.timm_model_name} cannot be made without pooling, which tokens need: "
                         f"{problem}") from problem
    if isinstance(visual, TimmModel):
        trunk.settle(visual, vision_cfg.timm_model_name)
    elif isinstance(visual, ModifiedResNet):
        trunk.settle_resnet(visual)
    else:
        visual.proj = None  # an unused parameter stops DDP at the second step
    return visual if regions == 1 else RegionTower(visual, regions, width(visual))


def load(visual: nn.Module, state_dict: dict[str, Tensor]) -> bool:
    """Load a file that holds a VQTower's VQ-VAE alone (`open_clip_mdc vq`). Returns False if the weights are others."""
    if not isinstance(visual, VQTower) or not all(name.startswith(PREFIX) for name in state_dict):
        return False
    visual.load_vq({name.removeprefix(PREFIX): weight for name, weight in state_dict.items()})
    return True


def region_tower(visual: nn.Module) -> nn.Module:
    return visual.tower if isinstance(visual, RegionTower) else visual


def width(visual: nn.Module) -> int:
    """Return D of the patch tokens."""
    if isinstance(visual, RegionTower):
        return width(visual.tower)
    if isinstance(visual, ModifiedResNet):
        return visual.width
    return visual.trunk.num_features if isinstance(visual, TimmModel) else visual.ln_post.normalized_shape[0]


def num_patches(visual: nn.Module) -> int:
    """Return P, unless some patches are dropped in training (patch_dropout)."""
    if isinstance(visual, RegionTower):
        return len(visual.region_embedding) * num_patches(visual.tower)
    return math.prod(grid(visual))


def has_mask(visual: nn.Module) -> bool:
    """Return True if the tower has a [MASK] of its own, which leaves a token's place known."""
    return isinstance(visual, VQTower)


def patch_tokens(visual: nn.Module, image: Tensor, masked: Tensor | None = None) -> Tensor:
    """Return normalised patch tokens [B, P, D] of images [B, 3, height, width], without class and register tokens.

    Tokens that were computed before, [B, P, D] in the place of images, are returned.

    `masked`, bool [B, P], are hidden by the [MASK] of a tower that has one.
    """
    if image.ndim == 3:
        return image
    if isinstance(visual, RegionTower):
        return visual.join(patch_tokens(visual.tower, visual.split(image)))
    if has_mask(visual):
        return visual(image, masked)[1]
    if isinstance(visual, (TimmModel, ModifiedResNet)):
        return trunk.tokens(visual, image)
    return visual(image)[1].contiguous()  # else every layer of the decoder copies it


def grid(visual: nn.Module) -> tuple[int, int]:
    """Return rows and columns of the patch tokens. Raises ValueError if they are of several regions."""
    if isinstance(visual, RegionTower):
        raise ValueError("this image tower sees an image in regions, whose tokens lie in no one grid")
    return tuple(visual.grid_size)


def num_layers(visual: nn.Module) -> int:
    if isinstance(visual, RegionTower):
        return num_layers(visual.tower)
    if isinstance(visual, (VQTower, ModifiedResNet)) or isinstance(visual, TimmModel) and not _has_blocks(visual):
        return 1
    return len(visual.trunk.blocks if isinstance(visual, TimmModel) else visual.transformer.resblocks)


def _has_blocks(visual: TimmModel) -> bool:  # of a ViT, whose norm applies to each of them
    return hasattr(visual.trunk, "num_prefix_tokens") and hasattr(visual.trunk, "blocks")


def has_class_token(visual: nn.Module) -> bool:
    if isinstance(visual, TimmModel):
        return getattr(visual.trunk, "has_class_token", visual.num_prefix == 1)
    return not isinstance(visual, (VQTower, RegionTower, ModifiedResNet))


def features(visual: nn.Module, image: Tensor, kind: str = "gap", layer: int = -1) -> Tensor:
    """Return image features after the tower's last norm, whatever the layer: [B, D], of "patches" [B, P, D].

    Args:
        image: [B, 3, height, width].
        kind: "gap", the mean of the patch tokens (Sec. 4.2); "cls", the class token; "patches", all patch tokens.
        layer: after which block, counted from 0, or from the end as -1, whose patch tokens the decoder attends to.

    Raises ValueError if there is no such kind, no such layer, or no class token.
    """
    if kind not in FEATURES:
        raise ValueError(f"kind is {kind!r}; it must be {', '.join(FEATURES[:-1])} or {FEATURES[-1]}")
    count = num_layers(visual)
    if not isinstance(layer, int) or isinstance(layer, bool) or not -count <= layer < count:
        raise ValueError(f"layer is {layer!r}; its image tower has layers 0 to {count - 1}, or -{count} to -1")
    if kind == "cls":
        if not has_class_token(visual):
            raise ValueError("this image tower has no class token: take the mean of its patches")
        return _blocks(visual, image, [layer % count])[0][1][:, 0]
    last = layer % count == count - 1
    tokens = patch_tokens(visual, image) if last else _blocks(visual, image, [layer % count])[0][0]
    return tokens.mean(1) if kind == "gap" else tokens


def layers(visual: nn.Module, image: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Return for each block the patch tokens [B, P, D] and the class and register tokens, all after the last norm.

    One pass computes them. The last patch tokens are those of `patch_tokens`. A network of feature maps gives each
    stage, whose P and D differ, and its last map.
    """
    if isinstance(visual, TimmModel) and not _has_blocks(visual):
        return [(tokens, None) for tokens in trunk.stages(visual, image)]
    if num_layers(visual) == 1 and not has_class_token(visual):
        return [(patch_tokens(visual, image), None)]
    found = _blocks(visual, image, list(range(num_layers(visual))))
    if isinstance(visual, RegionTower):
        tokens, regions = found[-1][0], visual.region_embedding
        found[-1] = tokens + regions.repeat_interleave(tokens.shape[1] // len(regions), 0), None
    return found


def _blocks(visual: nn.Module, image: Tensor, which: list[int]) -> list[tuple[Tensor, Tensor | None]]:
    if isinstance(visual, RegionTower):  # whose embeddings were learnt for the last layer
        return [(tokens.unflatten(0, (len(image), -1)).flatten(1, 2), None)
                for tokens, _ in _blocks(visual.tower, visual.split(image), which)]
    asked = dict(indices=which, stop_early=True, output_fmt="NLC", intermediates_only=True)
    if isinstance(visual, TimmModel):
        found = visual.trunk.forward_intermediates(image, norm=True, return_prefix_tokens=True, **asked)
        return [one if isinstance(one, tuple) else (one, None) for one in found]
    found = visual.forward_intermediates(image, normalize_intermediates=True, output_extra_tokens=True, **asked)
    return list(zip(found["image_intermediates"], found["image_intermediates_prefix"], strict=True))


def lock(visual: nn.Module, unlocked_groups: int = 0) -> None:
    """LiT: freeze the tower but for its last groups, as OpenCLIP counts them. Region embeddings are still learnt."""
    if isinstance(visual, RegionTower):
        return lock(visual.tower, unlocked_groups)
    if isinstance(visual, ModifiedResNet) and unlocked_groups:
        raise ValueError("--lock-image-unlocked-groups: a ResNet of OpenCLIP is locked whole or not at all")
    native = not isinstance(visual, (TimmModel, VQTower, ModifiedResNet))
    if native:
        visual.proj = nn.Parameter(torch.empty(0))  # upstream's last group; a captioner has none
    # What runs as in evaluation (Captioner.train) needs no other layers, whose checkpoints would lack what is loaded.
    visual.lock(unlocked_groups=unlocked_groups + (native and unlocked_groups > 0))
    if native:
        visual.proj = None


def keep_locked(visual: nn.Module) -> None:
    """Make a tower that is locked whole run as in evaluation, so that BatchNorm keeps its statistics."""
    tower = region_tower(visual)
    if not any(p.requires_grad for p in tower.parameters()):
        tower.eval()


def no_weight_decay(visual: nn.Module) -> set[str]:
    if isinstance(visual, RegionTower):
        return {"region_embedding", *(f"tower.{name}" for name in no_weight_decay(visual.tower))}
    if isinstance(visual, TimmModel):
        return {"trunk." + name for name in getattr(visual.trunk, "no_weight_decay", set)()}
    return set() if isinstance(visual, ModifiedResNet) else set(visual.no_weight_decay())
