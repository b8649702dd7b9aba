"""LiT (arXiv 2111.07991): a CLIP text tower is trained to match a captioner's image tower, which may stay locked.

An image's embedding is the mean of its patch tokens, linearly projected. The projection is learnt, too.

Dimensions: B images, P patches, D image width, E width of the embeddings.
"""
from typing import Any

import torch
from open_clip import CustomTextCLIP
from open_clip.model import CLIPVisionCfg
from torch import Tensor, nn

from ..models import towers
from .contrastive import project, projection

# OpenCLIP's constructor builds an image tower, which `LiT` then replaces. This is the smallest one.
PLACEHOLDER = CLIPVisionCfg(layers=1, width=8, head_width=8, patch_size=8, image_size=8)


class PooledTower(nn.Module):
    """A captioner's image tower with the pooling and projection that OpenCLIP's CLIP models expect."""

    def __init__(self, tower: nn.Module, embed_dim: int):
        super().__init__()
        self.tower, self.image_size = tower, tower.image_size
        self.proj = projection(towers.tower(tower).width, embed_dim)

    @property
    def patch_tower(self) -> nn.Module:
        return self.tower

    def forward(self, image: Tensor) -> Tensor:
        """Return embeddings [B, E] of images [B, 3, height, width], or of their patch tokens [B, P, D]."""
        return project(towers.patch_tokens(self.tower, image), self.proj)

    def lock(self, unlocked_groups: int = 0, freeze_bn_stats: bool = False) -> None:
        towers.tower(self.tower).lock(unlocked_groups)

    def train(self, mode: bool = True) -> "PooledTower":
        super().train(mode)
        towers.tower(self.tower).keep_locked()
        return self

    def set_grad_checkpointing(self, *args, **kwargs) -> None:
        self.tower.set_grad_checkpointing(*args, **kwargs)

    def no_weight_decay(self) -> set[str]:
        return {f"tower.{name}" for name in towers.tower(self.tower).no_weight_decay()}


class LiT(CustomTextCLIP):
    """OpenCLIP's two-tower model with a `PooledTower` as image tower."""

    def __init__(self, embed_dim: int, vision_cfg: CLIPVisionCfg | dict[str, Any], text_cfg: Any,
                 quick_gelu: bool = False, cast_dtype: torch.dtype | None = None, image_pool: str = "gap", **rest):
        super().__init__(embed_dim, PLACEHOLDER, text_cfg, quick_gelu, cast_dtype=cast_dtype, **rest)
        vision_cfg = CLIPVisionCfg(**vision_cfg) if isinstance(vision_cfg, dict) else vision_cfg
        self.visual = PooledTower(towers.build(vision_cfg, quick_gelu, cast_dtype), embed_dim)
