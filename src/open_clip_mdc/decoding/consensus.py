"""Minimum Bayes risk decoding (Kumar & Byrne 2004): choose the sample that is most similar to all samples of an image.

The most probable caption may be unlike all other probable ones. Minimum Bayes risk takes the caption with the highest
expected similarity to a caption from the model, estimated from samples. Similarity is that of CIDEr (Vedantam et al.
2015), the cosine of n-gram counts averaged over n = 1 to 4, but without weights, which depend on other images.

Dimensions: B images, S captions of each, R = B * S, L positions, N tokens of the longest caption, V vocabulary.
"""
import torch
from torch import Tensor

from ..text.special_tokens import caption_lengths

LONGEST = 4  # largest n of the n-grams


def likeness(text: Tensor, length: Tensor) -> Tensor:
    """Return the similarity of each pair of captions, from 0 to 1: float32 [S, S].

    Args:
        text: long [S, N], tokens without SOT. Those from EOT on are ignored.
        length: number of tokens before EOT, long [S].
    """
    # [S, N, S, N], pairs of captions at pairs of positions.
    equal = text[:, :, None, None] == text
    same, total = equal, torch.zeros(len(text), len(text), device=text.device)
    for n in range(1, 1 + min(LONGEST, text.shape[1])):
        if n > 1:
            # Equal n-grams, by their first positions.
            same = same[:, :-1, :, :-1] & equal[:, n - 1:, :, n - 1:]
        fits = torch.arange(same.shape[1], device=text.device) + n <= length[:, None]
        # [S, S], the dot products of counts.
        product = (same & fits[:, :, None, None] & fits).sum((1, 3)).float()
        norm = product.diagonal().sqrt()
        total += product / (norm[:, None] * norm).clamp_min(1)
    return total / LONGEST


def agreement(text: Tensor, samples: int, vocab_size: int) -> Tensor:
    """Return each caption's mean similarity to all captions of its image, itself included: float32 [R] from [R, L]."""
    length = caption_lengths(text, vocab_size) - 2
    text = text[:, 1:1 + int(length.max())]
    return torch.cat([likeness(*of_image).mean(1) for of_image in zip(
        text.split(samples), length.split(samples), strict=True)])
