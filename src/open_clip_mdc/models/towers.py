"""Image towers: an image becomes the normalised patch tokens that the decoder attends to (Sec. 3.2, Fig. 2).

One class for each family says all that depends on it. A new family is a class and its name in `TOWERS`. The module
inside is OpenCLIP's, so a checkpoint has OpenCLIP's names.

Dimensions: B images, P patches, D width, R register and class tokens.
"""
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from open_clip.model import CLIPVisionCfg, _build_vision_tower
from open_clip.modified_resnet import ModifiedResNet
from open_clip.timm_model import TimmModel
from open_clip.transformer import VisionTransformer
from torch import Tensor, nn

FEATURES = ("gap", "cls", "patches")
# What torch and timm call the options of `forward_intermediates`, for outputs of some blocks as [B, P, D].
SOME_BLOCKS = dict(stop_early=True, output_fmt="NLC", intermediates_only=True)


def family(visual: nn.Module) -> type["Tower"]:
    """Return the first family that an image tower matches."""
    for cls in TOWERS:
        if isinstance(visual, cls.matches):
            return cls
    raise TypeError(f"{type(visual).__name__} is no image tower that gives patch tokens")


def tower(visual: nn.Module) -> "Tower":
    """Return what is known of an image tower."""
    return family(visual)(visual)


def patch_tokens(visual: nn.Module, image: Tensor, masked: Tensor | None = None) -> Tensor:
    """Return normalised patch tokens [B, P, D] of images [B, 3, height, width], without class and register tokens.

    Args:
        image: if these are tokens already, [B, P, D], they are returned.
        masked: bool [B, P], tokens to replace by the tower's [MASK], if it has one.
    """
    return image if image.ndim == 3 else tower(visual).tokens(image, masked)


def patch_tower(model: nn.Module) -> nn.Module:
    """Return the module of a model that gives patch tokens. A module around it in `visual` names it `patch_tower`."""
    return getattr(model.visual, "patch_tower", model.visual)


def build(vision_cfg: CLIPVisionCfg, quick_gelu: bool = False, cast_dtype: torch.dtype | None = None,
          vq_cfg: Mapping[str, Any] | None = None, caption_cfg: Mapping[str, Any] | None = None) -> nn.Module:
    """Build a tower that returns all patch tokens after its last norm, without parameters that they do not need.

    Args:
        vq_cfg: if given, build a VQTower with the image size, patch size and width of `vision_cfg`.
        caption_cfg: what the functions in `AROUND` read.

    Raises ValueError if the tower gives no tokens, or if sizes do not fit.
    """
    if vq_cfg is not None:
        vq = import_module(".vq", __package__)  # adds its family to `TOWERS`
        visual = vq.VQTower(vq.VQCfg(**vq_cfg), vision_cfg.image_size, vision_cfg.patch_size, vision_cfg.width)
    else:
        # These settings turn off all that pools, for every family.
        tokens = dict(output_tokens=True, pool_type="avg", attentional_pool=False, final_ln_after_pool=False,
                      timm_pool="", timm_proj="none")
        try:
            visual = _build_vision_tower(vision_cfg.width, replace(vision_cfg, **tokens), quick_gelu, cast_dtype)
        except (ValueError, TypeError, AssertionError, NotImplementedError) as problem:
            if not vision_cfg.timm_model_name:
                raise
            raise ValueError(f"timm's {vision_cfg.timm_model_name} cannot be made without pooling, which tokens need: "
                             f"{problem}") from problem
        family(visual).remove_pooling(visual, vision_cfg.timm_model_name)
    for around in AROUND:
        visual = around(visual, caption_cfg or {})
    return visual


def tokens_of_map(x: Tensor, channels_first: bool = True, normalised: bool = False) -> Tensor:
    """Return normalised tokens [B, P, D] of a feature map, or of tokens. Without a norm of its own it gets a plain one.
    """
    if x.ndim == 4:
        # Places row by row, whatever the memory format.
        x = x.flatten(2).mT if channels_first else x.flatten(1, 2)  # [B, D, h, w] or [B, h, w, D] -> [B, P, D]
    return x.contiguous() if normalised else F.layer_norm(x, x.shape[-1:])


class Tower:
    """Name what the rest of the project asks of an image tower. Families answer what differs."""

    matches: type[nn.Module]
    has_mask = False  # True if it has a [MASK] of its own. A masked token then keeps its position embedding
    has_class_token = False
    num_layers = 1
    width: int  # D of the patch tokens

    def __init__(self, module: nn.Module):
        self.module = module
        self.core = module  # the module that sees one image at a time, also inside a tower that wraps it
        self.network = module  # what other libraries have of it, too
        self.grid = tuple(module.grid_size)  # rows and columns of the patch tokens
        self.num_patches = math.prod(self.grid)  # P. With patch_dropout, training has fewer

    @staticmethod
    def remove_pooling(module: nn.Module, name: str | None) -> None:
        """Remove parameters that get no gradient from patch tokens, as DDP stops at the second step because of one."""

    def tokens(self, image: Tensor, masked: Tensor | None = None) -> Tensor:
        """Return `patch_tokens` [B, P, D] of images [B, 3, height, width]."""
        return self.module(image)[1].contiguous()  # otherwise every decoder layer would copy it

    def blocks(self, image: Tensor, which: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        """Return patch tokens [B, P, D] and class and register tokens [B, R, D] after blocks and the last norm."""
        raise NotImplementedError

    def layers(self, image: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        """Return each block's patch tokens [B, P, D] and its class and register tokens, all after the last norm.

        They come from one pass, and the last patch tokens are those of `patch_tokens`. A convolutional network gives
        its stages, whose P and D differ, and its last feature map.
        """
        if self.num_layers == 1 and not self.has_class_token:
            return [(patch_tokens(self.module, image), None)]
        return self.blocks(image, list(range(self.num_layers)))

    def features(self, image: Tensor, kind: str = "gap", layer: int = -1) -> Tensor:
        """Return image features [B, D], or [B, P, D] for "patches". The tower's last norm is applied at every layer.

        Args:
            image: [B, 3, height, width].
            kind: "gap" is the mean of the patch tokens (Sec. 4.2), "cls" the class token, "patches" all patch tokens.
            layer: take the output of this block, from 0, or from -1 backwards. The decoder attends to layer -1.

        Raises ValueError if there is no such kind, no such layer, or no class token.
        """
        if kind not in FEATURES:
            raise ValueError(f"kind is {kind!r}: it must be {', '.join(FEATURES[:-1])} or {FEATURES[-1]}")
        count = self.num_layers
        if not isinstance(layer, Integral) or isinstance(layer, bool) or not -count <= layer < count:
            raise ValueError(f"layer is {layer!r}; this image tower has layers 0 to {count - 1}, or -{count} to -1")
        layer %= count
        if kind == "cls":
            if not self.has_class_token:
                raise ValueError("this image tower has no class token: take the mean of its patches")
            # The class token is the first of the prefix tokens [B, R, D].
            return self.blocks(image, [layer])[0][1][:, 0]
        # The last layer is what the decoder reads, to the last bit. `blocks` would compute it by another path.
        found = patch_tokens(self.module, image) if layer == count - 1 else self.blocks(image, [layer])[0][0]
        return found.mean(1) if kind == "gap" else found

    def lock(self, unlocked_groups: int = 0) -> None:
        """Freeze the tower except its last groups, as OpenCLIP counts them (LiT)."""
        # BatchNorm is not replaced by frozen layers, whose checkpoints would lack entries: see `keep_locked`.
        self.module.lock(unlocked_groups=unlocked_groups)

    def keep_locked(self) -> None:
        """Put a locked tower in eval mode, and in a free one each locked BatchNorm, or all with `freeze_bn_stats`."""
        if not any(p.requires_grad for p in self.core.parameters()):
            self.core.eval()
            return
        kept = getattr(self.module, "freeze_bn_stats", False)  # of a pretrained tower, see integration/image_rates.py
        for layer in self.core.modules():
            if getattr(layer, "running_var", None) is not None and (
                    kept or layer.weight is not None and not layer.weight.requires_grad):
                layer.eval()

    def no_weight_decay(self) -> set[str]:
        return set(self.module.no_weight_decay())

    def load(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Load a file that fills a part of the tower only, if this is one. Return whether it was."""
        return False


class ViT(Tower):
    """OpenCLIP's own transformer."""

    matches = VisionTransformer
    has_class_token = True

    def __init__(self, module: VisionTransformer):
        super().__init__(module)
        self.width, self.num_layers = module.ln_post.normalized_shape[0], len(module.transformer.resblocks)

    @staticmethod
    def remove_pooling(module: VisionTransformer, name: str | None) -> None:
        module.proj = None

    def blocks(self, image: Tensor, which: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        found = self.module.forward_intermediates(
            image, indices=which, normalize_intermediates=True, output_extra_tokens=True, **SOME_BLOCKS)
        return list(zip(found["image_intermediates"], found["image_intermediates_prefix"], strict=True))

    def lock(self, unlocked_groups: int = 0) -> None:
        # OpenCLIP's last group is the projection, which a captioner lacks. It stands there while groups are counted.
        self.module.proj = nn.Parameter(torch.empty(0))
        self.module.lock(unlocked_groups=unlocked_groups + (unlocked_groups > 0))
        self.module.proj = None


class Timm(Tower):
    """A model of timm that was made to classify: a ViT, or a network that ends in a feature map."""

    matches = TimmModel

    def __init__(self, module: TimmModel):
        super().__init__(module)
        self.network = trunk = module.trunk
        self.width = trunk.num_features
        # The last norm of a ViT fits the output of every block.
        self.is_vit = hasattr(trunk, "num_prefix_tokens") and hasattr(trunk, "blocks")
        self.num_layers = len(trunk.blocks) if self.is_vit else 1
        # A model without the attribute has a class token if it has one prefix token.
        self.has_class_token = getattr(trunk, "has_class_token", module.num_prefix == 1)

    @staticmethod
    def remove_pooling(module: TimmModel, name: str | None) -> None:
        from .timm_trial import settle
        settle(module, name)

    def tokens(self, image: Tensor, masked: Tensor | None = None) -> Tensor:
        return self.of_last(self.network.forward_features(image))

    def of_last(self, x: Tensor) -> Tensor:
        """Return patch tokens [B, P, D] from the output of timm's `forward_features`: tokens, or a feature map."""
        x = x if x.ndim == 4 else x[:, self.module.num_prefix:]  # without class and register tokens
        return tokens_of_map(x, self.module.channels_first, self.module.has_last_norm)

    def blocks(self, image: Tensor, which: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        found = self.network.forward_intermediates(
            image, indices=which, norm=True, return_prefix_tokens=True, **SOME_BLOCKS)
        return [one if isinstance(one, tuple) else (one, None) for one in found]

    def layers(self, image: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        if self.is_vit:
            return super().layers(image)
        if not hasattr(self.network, "forward_intermediates"):
            return [(self.tokens(image), None)]
        last, stages = self.network.forward_intermediates(image, output_fmt="NCHW")
        return [*((tokens_of_map(x), None) for x in stages), (self.of_last(last), None)]

    def no_weight_decay(self) -> set[str]:
        return {"trunk." + name for name in getattr(self.network, "no_weight_decay", set)()}


class ResNet(Tower):
    """CLIP's ResNet, which gives its last feature map."""

    matches = ModifiedResNet

    def __init__(self, module: ModifiedResNet):
        super().__init__(module)
        self.width = module.width

    @staticmethod
    def remove_pooling(module: ModifiedResNet, name: str | None) -> None:
        side = module.image_size // 32
        module.width, module.grid_size = module.attnpool.c_proj.in_features, (side, side)
        module.attnpool = nn.Identity()
        module.to(memory_format=torch.channels_last)

    def tokens(self, image: Tensor, masked: Tensor | None = None) -> Tensor:
        return tokens_of_map(self.module(image))

    def lock(self, unlocked_groups: int = 0) -> None:
        if unlocked_groups:
            raise ValueError("--lock-image-unlocked-groups: OpenCLIP's ResNet can only be locked whole")
        super().lock()

    def no_weight_decay(self) -> set[str]:
        return set()


# The first that matches counts. Files that few models need add their own, as vq.py does.
TOWERS: list[type[Tower]] = [ViT, Timm, ResNet]
# Functions (visual, fields of `caption_cfg`) -> visual that may put a module around a tower when it is built.
AROUND: list[Callable[[nn.Module, Mapping[str, Any]], nn.Module]] = []
