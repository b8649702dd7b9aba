"""Masked diffusion that learns most from the words that only the image tells.

A masked token weighs 1 - p(token | other words, null image) besides its 1/t. That is PRIOR's weight (arXiv 2505.08971)
by the decoder's own blind pass: the null image is the mean of the batch's patch tokens, without a gradient.

Dimensions: B images, P patches, D width, M predicted tokens.
"""
import torch
from torch import Tensor

from ..text.packing import Captions
from .masked import masked_diffusion, whole_interval
from .registry import register_objective


def what_the_image_tells(model, image_embs: Tensor, captions: Captions) -> tuple[Tensor, Captions]:
    """Return losses, float32 [M], and captions with the weights, from patch tokens [B, P, D]."""
    with torch.no_grad():
        blind = model.token_nll(image_embs.mean(0, keepdim=True).expand_as(image_embs), captions)
    told = 1 - (-blind).exp()  # [M], 0 for a word that the others tell
    predicted = captions.predicted._replace(weight=captions.predicted.weight * told)
    return model.token_nll(image_embs, captions), captions._replace(predicted=predicted)


register_objective("visual", corrupt_full_interval=whole_interval, forward=what_the_image_tells)(masked_diffusion)
