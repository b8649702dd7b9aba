"""The loss of predicted tokens, and the module that stands where OpenCLIP has its contrastive loss.

Dimensions: B captions, M predicted tokens, V vocabulary.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..text.packing import Predicted


def full_precision(logits: Tensor) -> Tensor:
    """At least float32, as a loss is taken."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, predicted: Predicted) -> Tensor:
    """-log p(token) of each asked token, float32 [M]."""
    return F.cross_entropy(full_precision(logits), predicted.token, reduction="none")


class CaptionLoss(nn.Module):
    """sum(token_weight * token_loss) / sum(num_target): stands where OpenCLIP has its contrastive loss.

    Divided by target, not by asked tokens: the gradient of a token then does not depend on how many others were
    masked, and micro-batches of an accumulated step add up to the step (the paper leaves the normaliser open).
    """

    def forward(
            self,
            token_nll: Tensor,
            token_weight: Tensor,
            num_target: Tensor,
            logit_scale: Tensor | None = None,
            length_nll: Tensor | None = None,
            output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or with `output_dict` its terms, which upstream adds up and logs.

        Args: [M], [M], [B] and [B] as `Captioner.forward` returns them; logit_scale is only there for upstream's log.
        """
        losses = {"caption_loss": (token_weight * token_nll).sum() / num_target.sum()}
        if length_nll is not None:
            losses["length_loss"] = length_nll.mean()
        return losses if output_dict else sum(losses.values())
