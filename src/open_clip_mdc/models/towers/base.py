"""What is asked of an image tower, whatever its family: `tower(visual)` answers.

Dimensions: B images, P patches, D width, R class and register tokens.
"""
import math
from collections.abc import Mapping

from torch import Tensor, nn

FEATURES = ("gap", "cls", "patches")


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


class Tower:
    """What the rest of the project asks of an image tower. Families answer what differs."""

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
        if not isinstance(layer, int) or isinstance(layer, bool) or not -count <= layer < count:
            raise ValueError(f"layer is {layer!r}; this image tower has layers 0 to {count - 1}, or -{count} to -1")
        if kind == "cls":
            if not self.has_class_token:
                raise ValueError("this image tower has no class token: take the mean of its patches")
            return self.blocks(image, [layer % count])[0][1][:, 0]
        last = layer % count == count - 1
        found = patch_tokens(self.module, image) if last else self.blocks(image, [layer % count])[0][0]
        return found.mean(1) if kind == "gap" else found

    def lock(self, unlocked_groups: int = 0) -> None:
        """Freeze the tower except its last groups, as OpenCLIP counts them (LiT)."""
        # BatchNorm is not replaced by frozen layers, whose checkpoints would lack entries: see `keep_locked`.
        self.module.lock(unlocked_groups=unlocked_groups)

    def keep_locked(self) -> None:
        """Put a locked tower in eval mode, and in a free one each locked BatchNorm, or all if it `keeps_statistics`."""
        if not any(p.requires_grad for p in self.core.parameters()):
            self.core.eval()
            return
        kept = getattr(self.module, "keeps_statistics", False)  # of a pretrained tower, see integration/image_rates.py
        for layer in self.core.modules():
            if getattr(layer, "running_var", None) is not None and (
                    kept or layer.weight is not None and not layer.weight.requires_grad):
                layer.eval()

    def no_weight_decay(self) -> set[str]:
        return set(self.module.no_weight_decay())

    def load(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Load a file that fills a part of the tower only, if this is one. Return whether it was."""
        return False


TOWERS: list[type[Tower]] = []  # the families, each added by the file that has it
