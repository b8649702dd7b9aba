"""GenLIP of OpenCLIP 4.x (arXiv 2605.00809): one transformer reads the patches, then the caption.

Images have the config's size here, and not NaFlex's varying one. The decoder reads linear embeddings of patches, so the
null image is the mean image in pixels.
"""
import torch
from timm.data.naflex_transforms import patchify_image
from torch import Tensor, nn

from .base import ForeignCaptioner


class GenLIPCaptioner(ForeignCaptioner):
    """`open_clip.naflex_genlip_model.NaFlexGenLip`, which OpenCLIP 3.3 does not have."""

    def __init__(self, model: nn.Module):
        cfg = model.text_cfg
        super().__init__(model, cfg.vocab_size, cfg.context_length, model.trunk_cfg.width, (cfg.bos_id, cfg.eos_id))
        self.patch_embed, model.patch_embed = model.patch_embed, nn.Identity()  # patches are embedded before
        self.patch_size = model.visual.patch_size
        self.grid = [size // patch for size, patch in zip(model.visual.image_size, self.patch_size, strict=True)]

    def encode(self, image: Tensor) -> Tensor:
        return self.patch_embed(torch.stack([patchify_image(x, self.patch_size)[0] for x in image]))

    def logits(self, tokens: Tensor, text: Tensor) -> Tensor:
        # Row and column of each patch, [P, 2].
        place = torch.cartesian_prod(*(torch.arange(size, device=text.device) for size in self.grid))
        image = {"patches": tokens, "patch_coord": place.expand(len(text), -1, -1),
                 "patch_valid": torch.ones(tokens.shape[:2], dtype=torch.bool, device=text.device)}
        # Padding lies behind the caption, where no token sees it.
        hidden, patches = self.model._encode(image, text, torch.ones_like(text, dtype=torch.bool))
        return self.model.lm_head(hidden[:, patches:])
