"""Consensus: of several captions of an image, the one that is most like all of them.

The most probable caption may be like no other probable one. Minimum Bayes risk (Kumar & Byrne 2004) takes the caption
with the highest expected likeness to a caption that the model draws, which the image's draws estimate. Likeness is
CIDEr's (Vedantam et al. 2015): the cosine of two captions' counts of n-grams, its mean over n = 1 to 4. CIDEr weighs an
n-gram by how few images have it. That is left out here, so that a caption does not depend on the images beside it.

Dimensions: B images, S captions of each, R = B * S, L positions, W tokens of the longest caption, V vocabulary.
"""
import torch
from torch import Tensor

from ..text.special_tokens import caption_lengths

LONGEST = 4  # n-gram


def likeness(text: Tensor, length: Tensor) -> Tensor:
    """Return how alike captions are, from 0 to 1: float32 [S, S].

    Args:
        text: tokens without SOT and from EOT on anything, long [S, W].
        length: tokens before EOT, long [S].
    """
    equal = text[:, :, None, None] == text  # tokens of two captions at two places, [S, W, S, W]
    same, total = equal, torch.zeros(len(text), len(text), device=text.device)
    for n in range(1, 1 + min(LONGEST, text.shape[1])):
        if n > 1:
            same = same[:, :-1, :, :-1] & equal[:, n - 1:, :, n - 1:]  # n-grams by where they begin
        fits = torch.arange(same.shape[1], device=text.device) + n <= length[:, None]
        product = (same & fits[:, :, None, None] & fits).sum((1, 3)).float()  # of counts
        norm = product.diagonal().sqrt()
        total += product / (norm[:, None] * norm).clamp_min(1)
    return total / LONGEST


def agreement(text: Tensor, samples: int, vocab_size: int) -> Tensor:
    """Return each caption's mean likeness to those of its image, itself too: float32 [R], from ids [R, L]."""
    length = caption_lengths(text, vocab_size) - 2
    text = text[:, 1:1 + int(length.max())]
    return torch.cat([likeness(*of_image).mean(1) for of_image in zip(
        text.split(samples), length.split(samples), strict=True)])
