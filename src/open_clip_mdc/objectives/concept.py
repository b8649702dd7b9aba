"""Words that name what is seen, hidden from a caption whose other words stay (ICMLM, Sariyildiz et al. 2020).

    loss = E over t of 1/t * sum over hidden concept words i of -log p(c_i | other words, image)

ICMLM (arXiv 2008.01392) takes frequent nouns, adjectives and verbs by a tagger, and hides one at a time. Here English
function words stay, all others are concept words, and they are hidden as by MDC. Such a model fills in words. It never
learnt to write function words, so it has no captions of its own and no likelihood of whole ones.

Dimensions: B captions, L positions, V vocabulary.
"""
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch
from open_clip.tokenizer import SimpleTokenizer
from torch import Tensor

from ..text.packing import NoisedCaptions
from ..text.special_tokens import eot_id, target_tokens
from .config import CaptionCfg
from .masked import masked_diffusion
from .registry import register_objective

FUNCTION_WORDS = (  # articles and their kind, conjunctions, prepositions, pronouns, auxiliary verbs, punctuation
    "a an the this that these those some any each every no another other both all and or but nor so while as if than "
    "because of in on at by to from with without into onto over under above below between behind beside near through "
    "across along around against after before during up down off out inside outside for about upon toward towards i "
    "you he she it we they me him her us them my your his its our their who whom whose which what where when there "
    "here is are was were be been being am has have had having do does did will would can could may might shall should "
    "must not . , ' ! ? ; : -").split()


@lru_cache
def tokenizer_of(bpe_path: str | None) -> SimpleTokenizer:
    """Return the tokenizer of a vocabulary, by a path or the name of a packaged file. None is CLIP's."""
    if bpe_path is None:
        return SimpleTokenizer()
    packaged = resources.files("open_clip_mdc.model_configs") / Path(bpe_path).name
    return SimpleTokenizer(bpe_path if Path(bpe_path).exists() else str(packaged))


@lru_cache
def function_words(bpe_path: str | None) -> Tensor:
    """Return the ids, long [F], of function words that are one token of a vocabulary. None is CLIP's."""
    encoded = map(tokenizer_of(bpe_path).encode, FUNCTION_WORDS)
    return torch.tensor([ids[0] for ids in encoded if len(ids) == 1])


@register_objective("concept", scorers=())
def concepts(text: Tensor, vocab_size: int, cfg: CaptionCfg, u: Tensor,
             generator: torch.Generator | None = None) -> NoisedCaptions:
    """Mask concept words with probability t, and weight them by 1/t. A caption that has none is masked as by MDC."""
    target = target_tokens(text, vocab_size)
    given = torch.isin(text, function_words(cfg.bpe_path).to(text.device)) | (text == eot_id(vocab_size))
    concept = target & ~given
    # No caption is without a target, as the loss is divided by their number.
    target = concept.where(concept.any(1, keepdim=True), target)
    return masked_diffusion(text, vocab_size, cfg, u, generator, target)
