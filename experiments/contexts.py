"""A second context for a trained captioner: all words to the left of a word are visible, and none to its right.

An autoregressive model reads every word in this context. A masked one is trained with random masks, and this is one of
the masks that it may draw. So one network can be asked for the same word of the same image in both contexts, and what
differs is the context alone: no second training, and no difference in what was learnt so far.

Dimensions: B captions, L positions, W tokens of a row, which has two streams in block diffusion.
"""
import torch
from torch import Tensor

from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.objectives.blocks import two_streams
from open_clip_mdc.text.packing import NoisedCaptions
from open_clip_mdc.text.special_tokens import mask_id, target_tokens


def left_context(model: Captioner, text: Tensor, asked: Tensor) -> NoisedCaptions:
    """Return captions [B, L] in which one token each, at `asked` [B], is predicted from the tokens before it.

    A causal model reads as it always does. A masked one has [MASK] from the token on to the end of the caption. In
    block diffusion, so has the token's block.
    """
    position = torch.arange(text.shape[1]).expand_as(text)
    if model.causal:
        mask = position == asked[:, None]
        return NoisedCaptions(text, mask, mask.float(), target_tokens(text, model.vocab_size), True,
                              torch.zeros(len(text)))
    if model.objective.order == "blocks":
        size = torch.full((len(text),), max(model.caption_cfg.block_sizes))
        text, position, valid, sight = two_streams(text, size, model.vocab_size, text.shape[1])
        streams = {"tokens": text, "position": position, "valid": valid, "sight": sight}
        target = sight.noisy & valid & (position > 0)
    else:
        streams, target = {}, target_tokens(text, model.vocab_size)
    hidden = target & (position >= asked[:, None])
    mask = target & (position == asked[:, None])
    return NoisedCaptions(text.masked_fill(hidden, mask_id(model.vocab_size)), mask, mask.float(), target, False,
                          torch.ones(len(text)), **streams)
