"""Image towers: an image becomes the normalised patch tokens that the decoder attends to (Sec. 3.2, Fig. 2).

This file holds everything that depends on the kind of tower. `visual` is what `build` returns: OpenCLIP's
VisionTransformer, ModifiedResNet or TimmModel, a RegionTower around one of these, or a VQTower. Checkpoints hold it
under the same name.

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
    """Build a tower that returns all patch tokens after its last norm, without parameters that they do not need.

    Args:
        vq_cfg: if given, build a VQTower with the image size, patch size and width of `vision_cfg`.
        regions: g of a RegionTower, whose tiles have `vision_cfg.image_size`. 1 builds a plain tower.

    Raises ValueError if the tower gives no tokens, or if sizes do not fit.
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
    """Load a file with only a VQTower's VQ-VAE (`open_clip_mdc vq`). Returns False for any other tower or weights."""
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
    """Return P. With patch_dropout, training has fewer."""
    if isinstance(visual, RegionTower):
        return len(visual.region_embedding) * num_patches(visual.tower)
    return math.prod(grid(visual))


def has_mask(visual: nn.Module) -> bool:
    """Return True if the tower has a [MASK] of its own. A masked token then keeps its position embedding."""
    return isinstance(visual, VQTower)


def patch_tokens(visual: nn.Module, image: Tensor, masked: Tensor | None = None) -> Tensor:
    """Return normalised patch tokens [B, P, D] of images [B, 3, height, width], without class and register tokens.

    Args:
        image: if these are tokens already, [B, P, D], they are returned.
        masked: bool [B, P], tokens to replace by the tower's [MASK], if it has one.
    """
    if image.ndim == 3:
        return image
    if isinstance(visual, RegionTower):
        return visual.join(patch_tokens(visual.tower, visual.split(image)))
    if has_mask(visual):
        return visual(image, masked)[1]
    if isinstance(visual, (TimmModel, ModifiedResNet)):
        return trunk.tokens(visual, image)
    return visual(image)[1].contiguous()  # otherwise every decoder layer would copy it


def grid(visual: nn.Module) -> tuple[int, int]:
    """Return rows and columns of the patch tokens. Raises ValueError for a RegionTower."""
    if isinstance(visual, RegionTower):
        raise ValueError("this image tower sees an image in regions, so its tokens do not form one grid")
    return tuple(visual.grid_size)


def num_layers(visual: nn.Module) -> int:
    if isinstance(visual, RegionTower):
        return num_layers(visual.tower)
    if isinstance(visual, (VQTower, ModifiedResNet)) or isinstance(visual, TimmModel) and not _has_blocks(visual):
        return 1
    return len(visual.trunk.blocks if isinstance(visual, TimmModel) else visual.transformer.resblocks)


def _has_blocks(visual: TimmModel) -> bool:  # True for a ViT, whose last norm fits the output of every block
    return hasattr(visual.trunk, "num_prefix_tokens") and hasattr(visual.trunk, "blocks")


def has_class_token(visual: nn.Module) -> bool:
    if isinstance(visual, TimmModel):
        return getattr(visual.trunk, "has_class_token", visual.num_prefix == 1)
    return not isinstance(visual, (VQTower, RegionTower, ModifiedResNet))


def features(visual: nn.Module, image: Tensor, kind: str = "gap", layer: int = -1) -> Tensor:
    """Return image features [B, D], or [B, P, D] for "patches". The tower's last norm is applied at every layer.

    Args:
        image: [B, 3, height, width].
        kind: "gap" is the mean of the patch tokens (Sec. 4.2), "cls" the class token, "patches" all patch tokens.
        layer: take the output of this block, from 0, or from -1 backwards. The decoder attends to layer -1.

    Raises ValueError if there is no such kind, no such layer, or no class token.
    """
    if kind not in FEATURES:
        raise ValueError(f"kind is {kind!r}: it must be {', '.join(FEATURES[:-1])} or {FEATURES[-1]}")
    count = num_layers(visual)
    if not isinstance(layer, int) or isinstance(layer, bool) or not -count <= layer < count:
        raise ValueError(f"layer is {layer!r}; this image tower has layers 0 to {count - 1}, or -{count} to -1")
    if kind == "cls":
        if not has_class_token(visual):
            raise ValueError("this image tower has no class token: take the mean of its patches")
        return _blocks(visual, image, [layer % count])[0][1][:, 0]
    last = layer % count == count - 1
    tokens = patch_tokens(visual, image) if last else _blocks(visual, image, [layer % count])[0][0]
    return tokens.mean(1) if kind == "gap" else tokens


def layers(visual: nn.Module, image: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Return each block's patch tokens [B, P, D] and its class and register tokens, all after the last norm.

    They come from one pass, and the last patch tokens are those of `patch_tokens`. A convolutional network gives its
    stages, whose P and D differ, and its last feature map.
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
    if isinstance(visual, RegionTower):  # whose region embeddings are for the last layer only
        return [(tokens.unflatten(0, (len(image), -1)).flatten(1, 2), None)
                for tokens, _ in _blocks(visual.tower, visual.split(image), which)]
    options = dict(indices=which, stop_early=True, output_fmt="NLC", intermediates_only=True)
    if isinstance(visual, TimmModel):
        found = visual.trunk.forward_intermediates(image, norm=True, return_prefix_tokens=True, **options)
        return [one if isinstance(one, tuple) else (one, None) for one in found]
    found = visual.forward_intermediates(image, normalize_intermediates=True, output_extra_tokens=True, **options)
    return list(zip(found["image_intermediates"], found["image_intermediates_prefix"], strict=True))


def lock(visual: nn.Module, unlocked_groups: int = 0) -> None:
    """Freeze the tower except its last groups, as OpenCLIP counts them (LiT). Region embeddings stay trainable."""
    if isinstance(visual, RegionTower):
        return lock(visual.tower, unlocked_groups)
    if isinstance(visual, ModifiedResNet) and unlocked_groups:
        raise ValueError("--lock-image-unlocked-groups: OpenCLIP's ResNet can only be locked whole")
    native = not isinstance(visual, (TimmModel, VQTower, ModifiedResNet))
    if native:
        visual.proj = nn.Parameter(torch.empty(0))  # OpenCLIP's last group, which a captioner lacks
    # BatchNorm is not replaced by frozen layers, whose checkpoints would lack entries: see `keep_locked`.
    visual.lock(unlocked_groups=unlocked_groups + (native and unlocked_groups > 0))
    if native:
        visual.proj = None


def keep_locked(visual: nn.Module) -> None:
    """Put a locked tower in eval mode, and in a free one each locked BatchNorm, or all if it `keeps_statistics`."""
    tower = region_tower(visual)
    if not any(p.requires_grad for p in tower.parameters()):
        tower.eval()
        return
    kept = getattr(visual, "keeps_statistics", False)  # of a pretrained tower, see integration/image_rates.py
    for layer in tower.modules():
        if getattr(layer, "running_var", None) is not None and (
                kept or layer.weight is not None and not layer.weight.requires_grad):
            layer.eval()


def no_weight_decay(visual: nn.Module) -> set[str]:
    if isinstance(visual, RegionTower):
        return {"region_embedding", *(f"tower.{name}" for name in no_weight_decay(visual.tower))}
    if isinstance(visual, TimmModel):
        return {"trunk." + name for name in getattr(visual.trunk, "no_weight_decay", set)()}
    return set() if isinstance(visual, ModifiedResNet) else set(visual.no_weight_decay())
