"""The loss of predicted tokens, and the module that stands where OpenCLIP has its contrastive loss.

Dimensions: B captions, M predicted tokens, V vocabulary, E width of embeddings.
"""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..text.packing import Predicted


def full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, predicted: Predicted) -> Tensor:
    """Return -log p of each predicted token, float32 [M]."""
    return F.cross_entropy(full_precision(logits), predicted.token, reduction="none")


class CaptionLoss(nn.Module):
    """sum(token_weight * token_loss) / sum(num_target), in the place of OpenCLIP's contrastive loss.

    Divided by target, not by predicted tokens: a token's gradient then does not depend on how many others were masked,
    and micro-batches of an accumulated step add up to the step (the paper leaves the normaliser open).
    """

    def __init__(self, contrastive: Callable[..., Tensor] | None = None, contrastive_weight: float = 1.0):
        """Args: OpenCLIP's loss of image and text features [B, E], for a captioner that has them, and its weight."""
        super().__init__()
        self.contrastive, self.contrastive_weight = contrastive, contrastive_weight

    def forward(self, token_nll: Tensor, token_weight: Tensor, num_target: Tensor, logit_scale: Tensor | None = None,
                length_nll: Tensor | None = None, image_features: Tensor | None = None,
                text_features: Tensor | None = None, logit_bias: Tensor | None = None,
                output_dict: bool = False) -> Tensor | dict[str, Tensor]:
        """Return the loss, or with `output_dict` its terms, of what `Captioner.forward` returns."""
        losses = {"caption_loss": (token_weight * token_nll).sum() / num_target.sum()}
        if length_nll is not None:
            losses["length_loss"] = length_nll.mean()
        if image_features is not None:
            losses["contrastive_loss"] = self.contrastive_weight * self.contrastive(
                image_features, text_features, logit_scale, logit_bias)
        return losses if output_dict else sum(losses.values())
