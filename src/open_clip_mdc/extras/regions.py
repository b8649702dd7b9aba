"""Region features: one tower encodes the downsampled image and its tiles at full resolution.

This is not in the paper. It tests the claim that region features give more precise captions. With g x g tiles of side s
the image has side g*s. The whole image, shrunk to side s, and its tiles go through the tower as 1 + g^2 images. Each
region has a learned embedding, which is added to its patch tokens, and the decoder attends to all of them. Compare with
the same tower at side s (no detail) and at side g*s (as many pixels, in one context).

Dimensions: B images, G = 1 + g^2 regions, P patches of a region, D width.
"""
import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from ..models.towers import TOWERS, Tower, patch_tokens, tower


def split(image: Tensor, grid: int) -> Tensor:
    """Return the shrunk image and then its tiles, row by row: [B*G, 3, h, w] from [B, 3, g*h, g*w]."""
    height, width = (side // grid for side in image.shape[2:])
    tiles = image.unflatten(3, (grid, width)).unflatten(2, (grid, height))  # [B, 3, g, h, g, w]
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [B, g^2, 3, h, w]
    return torch.cat((F.avg_pool2d(image, grid)[:, None], tiles), dim=1).flatten(0, 1)


class RegionTower(nn.Module):
    """An image tower that is applied to the regions of an image. `Regions` runs it."""

    def __init__(self, visual: nn.Module, grid: int):
        """Wrap a tower for images of side s. `grid` is g. Raises ValueError if `grid` is below 2, or for a VQ-VAE."""
        super().__init__()
        if tower(visual).has_mask:
            raise ValueError("caption_cfg.regions is for ViTs; this image tower is a VQ-VAE")
        if grid < 2:
            raise ValueError(f"caption_cfg.regions is {grid}: it must be 1, the whole image, or g for g x g tiles")
        self.tower, self.grid = visual, grid
        self.image_size = tuple(grid * n for n in to_2tuple(visual.image_size))
        self.region_embedding = nn.Parameter(torch.empty(1 + grid ** 2, tower(visual).width))
        nn.init.normal_(self.region_embedding, std=0.02)

    def set_input_size(self, image_size: int | tuple[int, int]) -> None:
        """Set the tile size (called by OpenCLIP for --force-image-size)."""
        self.tower.set_input_size(image_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.tower.set_grad_checkpointing(enable)


class Regions(Tower):
    """The patch tokens of all regions, the whole image's first."""

    matches = RegionTower

    def __init__(self, module: RegionTower):
        self.module, self.core, inner = module, module.tower, tower(module.tower)
        self.inner, self.network, self.width, self.num_layers = inner, inner.network, inner.width, inner.num_layers
        self.num_patches = len(module.region_embedding) * inner.num_patches

    @property
    def grid(self) -> tuple[int, int]:
        raise ValueError("this image tower sees an image in regions, so its tokens do not form one grid")

    def tokens(self, image: Tensor, masked: Tensor | None = None) -> Tensor:
        tokens = patch_tokens(self.module.tower, split(image, self.module.grid))  # [B*G, P, D]
        return self.embedded(tokens.unflatten(0, (-1, len(self.module.region_embedding))))

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return tokens [B, G*P, D] with the embeddings of their regions, from [B, G, P, D]."""
        return (tokens + self.module.region_embedding[:, None]).flatten(1, 2)

    def blocks(self, image: Tensor, which: list[int]) -> list[tuple[Tensor, Tensor | None]]:
        found = self.inner.blocks(split(image, self.module.grid), which)
        return [(tokens.unflatten(0, (len(image), -1)).flatten(1, 2), None) for tokens, _ in found]

    def layers(self, image: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        found = super().layers(image)
        if self.num_layers > 1:  # `blocks` gives them without the embeddings, which are for the last layer only
            tokens = found[-1][0].unflatten(1, (len(self.module.region_embedding), -1))  # [B, G, P, D]
            found[-1] = self.embedded(tokens), None
        return found

    def lock(self, unlocked_groups: int = 0) -> None:
        """Freeze the tower inside. Region embeddings stay trainable."""
        self.inner.lock(unlocked_groups)

    def no_weight_decay(self) -> set[str]:
        return {"region_embedding", *(f"tower.{name}" for name in self.inner.no_weight_decay())}


TOWERS.append(Regions)
