"""The loss of predicted tokens (Eqs. 5, 7), and the module that replaces OpenCLIP's contrastive loss.

Dimensions: B images, R captions, M predicted tokens, W decoder width, V vocabulary.
"""
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..text.packing import Predicted

LOSS_ROWS = 4096  # tokens whose logits are held at a time. Smaller chunks take longer.


def full_precision(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def cross_entropy(logits: Tensor, predicted: Predicted) -> Tensor:
    """Return -log p of each predicted token, float32 [M], from logits [M, V]."""
    return F.cross_entropy(full_precision(logits), predicted.token, reduction="none")


def in_chunks(loss: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return loss(*tensors), float32 [M], of tensors with M rows, such as hidden states [M, W], chunk by chunk."""
    # Logits are computed in each chunk, and again for the gradient, so that [M, V] is never held whole. Compiled code
    # holds it in 16 bit, and would recompile a loop for each number of chunks.
    if torch.compiler.is_compiling() or len(tensors[0]) <= LOSS_ROWS:
        return loss(*tensors)
    chunks = zip(*(x.split(LOSS_ROWS) for x in tensors), strict=True)
    return torch.cat([checkpoint(loss, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks])


class CaptionLoss(nn.Module):
    """sum(token_weight * token_nll) / sum(num_target), used in the place of OpenCLIP's contrastive loss."""

    def forward(self, token_nll: Tensor, token_weight: Tensor, num_target: Tensor, logit_scale: Tensor | None = None,
                length_nll: Tensor | None = None, output_dict: bool = False) -> Tensor | dict[str, Tensor]:
        """Return the loss, or with `output_dict` its terms by name, from the outputs of `Captioner.forward`."""
        # The divisor counts target tokens, not predicted ones. So a token's gradient does not depend on how many others
        # were masked, and accumulated micro-batches add up to the whole batch. The paper does not say what it divides
        # by.
        if token_nll.shape != token_weight.shape:
            raise ValueError(f"the objective gave losses {list(token_nll.shape)} of {len(token_weight)} tokens")
        losses = {"caption_loss": (token_weight * token_nll).sum() / num_target.sum()}  # [M] and [R] -> a scalar
        if length_nll is not None:
            losses["length_loss"] = length_nll.mean()
        return losses if output_dict else sum(losses.values())
