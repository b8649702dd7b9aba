"""Decoding of block diffusion: one block after another, and within a block the most confident token first (Eq. 6).

A caption ends where a block holds EOT, so no length has to be known. Keys and values of finished blocks are kept
(Arriola et al. 2025). A block of K tokens takes K passes of its K tokens, and one more that keeps it.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, n tokens of a block, M predicted tokens,
P patches, W decoder width, V vocabulary.
"""
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.caption_logits import BlockReader
from ..models.captioner import Captioner
from ..models.interface import Network
from ..text.special_tokens import PAD_ID, eot_id, sot_id, valid_tokens
from .confidence import fully_masked, unmask_by_confidence
from .options import Search, Unmasking
from .sampling import Decoded


def unmask_blocks(network: Network, keep: Callable[[Tensor], None], text: Tensor, size: int, vocab_size: int,
                  options: Unmasking, forbidden: Sequence[int]) -> Decoded:
    """Fill in the masks of `text`, block by block, until each caption has an EOT. The host waits once a block.

    Args:
        network: takes texts of the token before a block and the block, see `BlockReader`.
        keep: takes each finished block, long [R, n].
        text: long [R, L], mask_id at the tokens to fill in. The last token of a row is EOT at the latest.
        size: tokens in a block. The last block may have fewer.
        forbidden: ids that must not be chosen.
    """
    eot = eot_id(vocab_size)
    ended = torch.zeros(len(text), 1, dtype=torch.bool, device=text.device)
    before = torch.full_like(text[:, :1], sot_id(vocab_size))
    parts = []
    for start in range(0, text.shape[1], size):
        # A caption that has ended only fills its block, as in training.
        block = torch.cat((before, text[:, start:start + size].masked_fill(ended, eot)), 1)  # [R, 1 + n]
        found = unmask_by_confidence(network, block, vocab_size, options, forbidden,
                                     torch.ones_like(block, dtype=torch.bool))
        block, step, log_prob = (part[:, 1:] for part in found)
        after = ended | ~valid_tokens(block, vocab_size)  # [R, n], what follows the first EOT of a caption
        block, given = block.masked_fill(after, eot), after | (step < 0)
        parts.append((block.masked_fill(after, PAD_ID), (step + start).masked_fill(given, -1),
                      log_prob.masked_fill(given, 0.0)))
        ended = (block == eot).any(1, keepdim=True)
        if ended.all():
            break
        keep(block)
        before = block[:, -1:]
    return Decoded(*(torch.cat(part, 1) for part in zip(*parts, strict=True)))


def rows_of(model: Captioner, text: Tensor | None, length: int | str | None, device: torch.device) -> Tensor:
    """Return the rows to fill in, long [1 or B, L]: a text with gaps, or SOT, masks, and EOT after the most tokens.

    EOT fills whole blocks, as in training, whatever the other texts of the batch.
    """
    eot = eot_id(model.vocab_size)
    if text is None:
        most = Search(length=length).max_length(model.context_length - 2)
        text = fully_masked(torch.tensor([most], device=device), model.vocab_size, most)
    else:
        valid = valid_tokens(text, model.vocab_size)
        text = text.masked_fill(~valid, eot)[:, :int(valid.sum(1).max())].to(device)
    return F.pad(text, (0, -text.shape[1] % model.caption_cfg.block_sizes[0]), value=eot)[:, :model.context_length]


def caption_in_blocks(model: Captioner, image_embs: Tensor, text: Tensor | None, options: Unmasking,
                      guided: Callable[[Callable[[Tensor], Network]], Network]) -> Decoded:
    """Caption images by block diffusion, R = samples * B.

    Args:
        image_embs: patch tokens [B, P, D].
        text: captions to fill in, long [1 or B, L], from left to right, as no block sees a later one.
        options: `length` is the most tokens before EOT. Without it they are what fits the context.
        guided: makes the network of the whole decoding from a function that makes one of patch tokens.

    Raises ValueError for the sampler "ancestral", which is of whole captions.
    """
    if options.sampler != "confidence":
        raise ValueError(f"sampler is {options.sampler!r}: a model that decodes block by block needs 'confidence' or "
                         "'beam'")
    readers = []

    def network_of(image_embs: Tensor) -> Network:
        readers.append(BlockReader(model.text, model.text.project_image(image_embs)))
        return readers[-1]

    def keep(block: Tensor) -> None:
        for reader in readers:
            reader.keep(block)

    network = guided(network_of)
    rows = rows_of(model, text, options.length, image_embs.device)
    # The end of a text with gaps is given.
    forbidden = (sot_id(model.vocab_size),) if text is None else (sot_id(model.vocab_size), eot_id(model.vocab_size))
    rows = rows.expand(len(image_embs), -1).repeat_interleave(options.samples, 0)
    return unmask_blocks(network, keep, rows, model.caption_cfg.block_sizes[0], model.vocab_size, options, forbidden)
