"""Masked diffusion that learns most from the words that only the image tells.

A masked token weighs 1 - p(token | other words, null image) besides its 1/t. That is PRIOR's weight (arXiv 2505.08971)
by the decoder's own blind pass: the null image is the mean of the batch's patch tokens, without a gradient.

The control `visual-table` asks if it matters where a word stands: each word has one weight, by a table or by its kind.

Dimensions: B images, P patches, D width, L positions, M predicted tokens, V vocabulary.
"""
from functools import lru_cache

import torch
from torch import Tensor

from ..text.packing import Captions, NoisedCaptions
from ..text.special_tokens import eot_id
from .concept import function_words, tokenizer_of
from .config import CaptionCfg
from .masked import masked_diffusion, whole_interval
from .registry import register_objective

# Means of 1 - p(word | other words, null image) in 1,000 captions of Flickr8k, by the packaged captioner: of function
# words with EOT, and of all others.
FUNCTION_WEIGHT, OTHER_WEIGHT = 0.43, 0.94


def what_the_image_tells(model, image_embs: Tensor, captions: Captions) -> tuple[Tensor, Captions]:
    """Return losses, float32 [M], and captions with the weights, from patch tokens [B, P, D]."""
    with torch.no_grad():
        blind = model.token_nll(image_embs.mean(0, keepdim=True).expand_as(image_embs), captions)
    told = 1 - (-blind).exp()  # [M], 0 for a word that the others tell
    predicted = captions.predicted._replace(weight=captions.predicted.weight * told)
    return model.token_nll(image_embs, captions), captions._replace(predicted=predicted)


register_objective("visual", corrupt_full_interval=whole_interval, forward=what_the_image_tells)(masked_diffusion)


@lru_cache
def weights_of_ids(words: tuple[tuple[str, float], ...], bpe_path: str | None, vocab_size: int) -> Tensor:
    """Return the weight of each id, float32 [V], from pairs of a word and its weight. Others weigh by their kind.

    Raises ValueError for a word that is several tokens of the vocabulary.
    """
    function = torch.isin(torch.arange(vocab_size), function_words(bpe_path))
    weights = torch.where(function, FUNCTION_WEIGHT, OTHER_WEIGHT)
    weights[eot_id(vocab_size)] = FUNCTION_WEIGHT
    for word, weight in words:
        ids = tokenizer_of(bpe_path).encode(word)
        if len(ids) != 1:
            raise ValueError(f"caption_cfg.word_weights has {word!r}, which is {len(ids)} tokens of this vocabulary: "
                             "leave it out, as a weight is of one token")
        weights[ids[0]] = weight
    return weights


@register_objective("visual-table", corrupt_full_interval=whole_interval, weighs_words=True)
def weighed_by_table(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
                     generator: torch.Generator | None = None) -> NoisedCaptions:
    """Mask captions [B, L] as MDC does, and multiply the weight of a masked token by that of its word."""
    noised = masked_diffusion(text, vocab_size, cfg, u, generator)
    weights = weights_of_ids(tuple(cfg.word_weights.items()), cfg.bpe_path, vocab_size)
    return noised._replace(weight=noised.weight * weights.to(text.device)[text])
