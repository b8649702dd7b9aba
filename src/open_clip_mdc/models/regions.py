"""Region features: one tower encodes the downsampled image and its tiles at full resolution.

This is not in the paper. It tests the claim that region features give more precise captions. With g x g tiles of side s
the image has side g*s. The whole image, shrunk to side s, and its tiles go through the tower as 1 + g^2 images. Each
region has a learned embedding, which is added to its patch tokens, and the decoder attends to all of them. Compare with
the same tower at side s (no detail) and at side g*s (as many pixels, in one context).

Dimensions: B images, G = 1 + g^2 regions, P patches of a region, D width.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split(image: Tensor, grid: int) -> Tensor:
    """Return the shrunk image and then its tiles, row by row: [B*G, 3, h, w] from [B, 3, g*h, g*w]."""
    height, width = (side // grid for side in image.shape[2:])
    tiles = image.unflatten(3, (grid, width)).unflatten(2, (grid, height))  # [B, 3, g, h, g, w]
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [B, g^2, 3, h, w]
    return torch.cat((F.avg_pool2d(image, grid)[:, None], tiles), dim=1).flatten(0, 1)


class RegionTower(nn.Module):
    """An image tower that is applied to the regions of an image. encoder.py runs it."""

    def __init__(self, tower: nn.Module, grid: int, width: int):
        """Wrap a `tower` for images of side s. `grid` is g, `width` is D. Raises ValueError if `grid` is below 2."""
        super().__init__()
        if grid < 2:
            raise ValueError(f"caption_cfg.regions is {grid}: it must be 1, the whole image, or g for g x g tiles")
        self.tower, self.grid = tower, grid
        side = tower.image_size
        self.image_size = tuple(grid * n for n in (side if isinstance(side, (tuple, list)) else (side, side)))
        self.region_embedding = nn.Parameter(torch.empty(1 + grid ** 2, width))
        nn.init.normal_(self.region_embedding, std=0.02)

    def split(self, image: Tensor) -> Tensor:
        """Return regions [B*G, 3, s, s] of images [B, 3, g*s, g*s], each image's one after another."""
        return split(image, self.grid)

    def join(self, tokens: Tensor) -> Tensor:
        """Return the tokens of an image's regions, [B, G*P, D], the whole image first, from [B*G, P, D]."""
        return (tokens.unflatten(0, (-1, len(self.region_embedding))) + self.region_embedding[:, None]).flatten(1, 2)

    def set_input_size(self, image_size: int | tuple[int, int]) -> None:
        """Set the tile size (called by OpenCLIP for --force-image-size)."""
        self.tower.set_input_size(image_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.tower.set_grad_checkpointing(enable)
