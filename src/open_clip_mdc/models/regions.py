"""Region features: an image is seen whole and small, and in tiles at full resolution, by one tower.

Not in the paper: captions of region features are claimed to be the more precise ones. With g x g tiles of side s the
image has side g*s. The whole of it, shrunk to s, and its tiles go through the tower in one batch of 1 + g^2 images, and
the decoder attends to the patch tokens of all, to each of which its region's learned embedding is added. The same
tower at s sees as much of the whole and no detail, at g*s as many pixels and all of them in one context.

Dimensions: B images, G = 1 + g^2 regions, P patches of a region, D width.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split(image: Tensor, grid: int) -> Tensor:
    """Shrink the whole image, then cut its tiles row by row: [B, 3, g*h, g*w] -> [B*G, 3, h, w]."""
    height, width = (side // grid for side in image.shape[2:])
    tiles = image.unflatten(3, (grid, width)).unflatten(2, (grid, height))  # [B, 3, g, h, g, w]
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # [B, g^2, 3, h, w]
    return torch.cat((F.avg_pool2d(image, grid)[:, None], tiles), dim=1).flatten(0, 1)


class RegionTower(nn.Module):
    """A tower in the place of `visual`, run by encoder.py."""

    def __init__(self, tower: nn.Module, grid: int, width: int):
        """Args: `tower` is for images of side s, `width` is D. Raises ValueError if `grid` is less than 2."""
        super().__init__()
        if grid < 2:
            raise ValueError(f"caption_cfg.regions is {grid}; it must be 1, the whole image, or g for g x g tiles")
        self.tower, self.grid = tower, grid
        side = tower.image_size
        self.image_size = tuple(grid * n for n in (side if isinstance(side, (tuple, list)) else (side, side)))
        self.region_embedding = nn.Parameter(torch.empty(1 + grid ** 2, width))
        nn.init.normal_(self.region_embedding, std=0.02)

    def split(self, image: Tensor) -> Tensor:
        """[B, 3, g*s, g*s] -> [B*G, 3, s, s], those of an image one after another."""
        return split(image, self.grid)

    def join(self, tokens: Tensor) -> Tensor:
        """[B*G, P, D] -> [B, G*P, D], the whole image first."""
        return (tokens.unflatten(0, (-1, len(self.region_embedding))) + self.region_embedding[:, None]).flatten(1, 2)

    def set_input_size(self, image_size: int | tuple[int, int]) -> None:
        """Set the tile size (called by OpenCLIP for --force-image-size)."""
        self.tower.set_input_size(image_size)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.tower.set_grad_checkpointing(enable)
