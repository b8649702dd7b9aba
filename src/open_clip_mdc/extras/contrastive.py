"""A captioner that is also trained with CLIP's contrastive loss, as CoCa and SigLIP 2 are.

The image is encoded once. The mean of its patch tokens is projected for the contrastive loss, and the decoder attends
to the tokens. A text tower of CLIP, as large as the decoder, encodes the texts. The paper has no such model.

Dimensions: B images and texts, P patches, L positions, D image width, E width of the embeddings.
"""
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, _build_text_tower
from torch import Tensor, nn
from torch.func import functional_call

from ..integration.factory import Config, OpenCLIPCaptioner
from ..objectives.config import CaptionCfg
from ..objectives.loss import CaptionLoss
from ..text.packing import Captions


def projection(width: int, embed_dim: int) -> nn.Parameter:
    """Return a linear projection [D, E], initialised as CLIP's."""
    return nn.Parameter(width ** -0.5 * torch.randn(width, embed_dim))


def project(image_embs: Tensor, weight: Tensor) -> Tensor:
    """Return the projected mean of patch tokens, [B, E] from [B, P, D]."""
    feature = image_embs.mean(dim=1)
    return feature @ weight.to(feature.dtype)


class ContrastiveLoss(CaptionLoss):
    """A captioner's loss, and OpenCLIP's loss of image and text features at a weight."""

    def __init__(self, contrastive: Callable[..., Tensor], weight: float = 1.0):
        super().__init__()
        self.contrastive, self.weight = contrastive, weight

    def forward(self, *, image_features: Tensor, text_features: Tensor, logit_scale: Tensor,
                logit_bias: Tensor | None = None, output_dict: bool = False, **captions) -> Tensor | dict[str, Tensor]:
        """Return the loss, or with `output_dict` its terms by name. The features are [B, E]."""
        losses = super().forward(**captions, output_dict=True)
        losses["contrastive_loss"] = self.weight * self.contrastive(image_features, text_features, logit_scale,
                                                                    logit_bias)
        return losses if output_dict else sum(losses.values())


class OpenCLIPContrastiveCaptioner(OpenCLIPCaptioner):
    """The captioner for a `caption_cfg` with a `contrastive_weight`, which has CLIP's text tower beside its decoder.

    OpenCLIP's train loop, evaluation and `ClipLoss` rely on `encode_image`, `encode_text`, the parameters `logit_scale`
    and `logit_bias` (for --siglip), and on normalised `image_features` and `text_features` in the output of `forward`.
    """

    contrasts = True

    def __init__(self, embed_dim: int, vision_cfg: CLIPVisionCfg | Config, text_cfg: CLIPTextCfg | Config,
                 caption_cfg: CaptionCfg | Config, init_logit_scale: float = math.log(1 / 0.07),
                 init_logit_bias: float | None = None, **options):
        """Build the captioner first, so that its weights start as those of a plain captioner. Then the text tower.

        Args: those of OpenCLIP's model classes. E is `embed_dim`.
        """
        super().__init__(None, vision_cfg, text_cfg, caption_cfg, **options)
        self.text_tower = _build_text_tower(
            embed_dim, text_cfg, options.get("quick_gelu", False), options.get("cast_dtype"))
        self.image_projection = projection(self.image_width, embed_dim)
        del self.logit_scale  # the buffer
        self.logit_scale = nn.Parameter(torch.tensor(init_logit_scale))
        if init_logit_bias is not None:
            self.logit_bias = nn.Parameter(torch.tensor(float(init_logit_bias)))

    @classmethod
    def caption_loss(cls, caption_cfg: Config, openclip_loss: Callable[[], Callable]) -> CaptionLoss:
        return ContrastiveLoss(openclip_loss(), caption_cfg["contrastive_weight"])

    def set_grad_checkpointing(self, enable: bool = True, impl: str = "inline") -> None:
        super().set_grad_checkpointing(enable, impl)
        if impl == "inline":
            self.text_tower.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        return super().no_weight_decay() | {f"text_tower.{name}" for name in self.text_tower.no_weight_decay()}

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Return the embedding to compare with `encode_text`'s, [B, E]: the mean of the patch tokens, projected."""
        return self.embed(self.encode_image_tokens(image), normalize)

    def embed(self, image_embs: Tensor, normalize: bool) -> Tensor:
        """Return image embeddings [B, E] from patch tokens [B, P, D]."""
        features = project(image_embs, self.image_projection)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, text: Tensor, normalize: bool = False) -> Tensor:
        """Return text embeddings [B, E] from ids [B, L]. Raises ValueError if L exceeds the context."""
        length = text.shape[1]
        self.check_length(length)
        shorter = {"attn_mask": self.text_tower.attn_mask[:length, :length]}  # OpenCLIP 3.3 does not cut it
        features = functional_call(self.text_tower, shorter, text)
        return F.normalize(features, dim=-1) if normalize else features

    def prepare(self, text: Tensor) -> Captions:
        """Noise and pack a batch as `Captioner.prepare`, and keep the clean text, cut to the longest caption."""
        captions = super().prepare(text)
        return captions._replace(text=text[:, :captions.packed.valid.shape[1]])

    def losses(self, image_embs: Tensor, captions: Captions) -> dict[str, Tensor]:
        """Return `Captioner.losses` and, if the clean text was kept, normalised image and text features [B, E]."""
        output = super().losses(image_embs, captions)
        output["logit_scale"] = self.logit_scale.exp()
        if captions.text is not None:
            output |= {"image_features": self.embed(image_embs, True),
                       "text_features": self.encode_text(captions.text, True)}
            if self.logit_bias is not None:
                output["logit_bias"] = self.logit_bias
        return output
