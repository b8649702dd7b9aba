"""The loss of predicted tokens (Eqs. 5, 7), and the module that replaces OpenCLIP's contrastive loss.

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
    """sum(token_weight * token_nll) / sum(num_target), used in the place of OpenCLIP's contrastive loss.

    The divisor counts target tokens, not predicted ones. So a token's gradient does not depend on how many others were
    masked, and accumulated micro-batches add up to the whole batch. The paper does not say what it divides by.
    """

    def __init__(self, contrastive: Callable[..., Tensor] | None = None, contrastive_weight: float = 1.0):
        """Args: `contrastive` is OpenCLIP's loss of image and text features [B, E], for a captioner with both."""
        super().__init__()
        self.contrastive, self.contrastive_weight = contrastive, contrastive_weight

    def forward(self, token_nll: Tensor, token_weight: Tensor, num_target: Tensor, logit_scale: Tensor | None = None,
                length_nll: Tensor | None = None, image_features: Tensor | None = None,
                text_features: Tensor | None = None, logit_bias: Tensor | None = None,
                output_dict: bool = False) -> Tensor | dict[str, Tensor]:
        """Return the loss, or with `output_dict` its terms by name, from the outputs of `Captioner.forward`."""
        losses = {"caption_loss": (token_weight * token_nll).sum() / num_target.sum()}
        if length_nll is not None:
            losses["length_loss"] = length_nll.mean()
        if image_features is not None:
            losses["contrastive_loss"] = self.contrastive_weight * self.contrastive(
                image_features, text_features, logit_scale, logit_bias)
        return losses if output_dict else sum(losses.values())
