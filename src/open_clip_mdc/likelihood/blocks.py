"""The likelihood of block diffusion: the chain rule over blocks, and within each the heuristic or the bound of Eq. 8.

    log p(x) = sum over blocks b of log p(x^b | x^<b, image)

Blocks see the true tokens of those before them, so all blocks of a caption are scored at once, in as many passes as a
block has tokens. In blocks of one token this is Eq. 7. What fills the last block after EOT counts to EOT.

Dimensions: R captions, L positions, K tokens of a block, M predicted tokens, V vocabulary, D draws.
"""
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.confidence import reveal
from ..objectives.blocks import filled
from ..text.packing import scatter_flat
from ..text.special_tokens import caption_lengths, mask_id
from .draws import draw_masks, estimate
from .exact import confidence_and_score, estimated, token_log_prob
from .scoring import Call, Likelihood, Scoring


def whole_blocks(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return captions in whole blocks, long [R, number * K], their tokens [R], and what is scored, bool like them."""
    (_, text, vocab_size), (size, context_length) = call.rows, call.blocks
    number = -(-int(caption_lengths(text, vocab_size).max()) // size)  # of blocks
    width = number * size
    text, count = filled(F.pad(text, (0, max(0, width - text.shape[1])))[:, :width], size, vocab_size, context_length)
    position = torch.arange(width)
    return text, count, (position > 0) & (position < count[:, None])  # SOT is given


def monte_carlo_in_blocks(call: Call, options: Scoring) -> Likelihood:
    """Return the sum over blocks of the estimate of Eq. 8 within each, and its standard error.

    A pass draws the masks of all blocks at once. If a block has few masks, as one of 4 tokens has, all are drawn.
    Args: `options` has the most draws of a block, their seed, and an interval.
    """
    (size, context_length), (text, count, masked) = call.blocks, whole_blocks(call)
    token_logits = call.network(count.tolist(), clean=text)
    tokens = masked.view(len(text), -1, size).sum(2).numpy()  # of each block, [R, number]
    # Blocks have draws of their own, so that their errors are independent.
    draws = {(block, n): draw_masks(n, options.num_samples, options.seed * context_length + block, options.interval)
             for block, column in enumerate(tokens.T) for n in set(column.tolist()) if n}
    hidden = np.zeros((max((len(own.hidden) for own in draws.values()), default=0), *tokens.shape, size), dtype=bool)
    for (block, n), own in draws.items():
        first = int(block == 0)  # after SOT
        hidden[:len(own.hidden), tokens[:, block] == n, block, first:first + n] = own.hidden[:, None]
    text = text.to(call.device, non_blocking=True)
    sums = torch.zeros(hidden.shape[:3], device=text.device)
    for number, now in enumerate(hidden):
        places = call.to_device(now.ravel().nonzero()[0])
        noisy = scatter_flat(text, places, mask_id(call.model.vocab_size))
        found = scatter_flat(torch.zeros(text.shape, device=text.device), places, token_log_prob(
            token_logits(noisy, places), text.take(places)))
        sums[number] = found.view(now.shape).sum(2)
    values = sums.cpu().numpy().astype(float) / np.maximum(hidden.sum(3), 1)  # [D, R, number]
    score, variance, used = np.zeros(len(text)), np.zeros(len(text)), np.zeros(len(text), dtype=int)
    for (block, n), own in draws.items():
        rows = tokens[:, block] == n
        value, error = estimate(values[:len(own.hidden), rows, block].T, own)
        score[rows] += value
        variance[rows] += error ** 2
        used[rows] = np.maximum(used[rows], len(own.hidden))
    return estimated(text.device, score, np.sqrt(variance), used)


def heuristic_in_blocks(call: Call, options: Scoring) -> Likelihood:
    """Return log-likelihoods of captions in order of confidence within each block."""
    (network, text, vocab_size), (size, _) = call.rows, call.blocks
    lengths, text_length = caption_lengths(text, vocab_size), text.shape[1]
    text, count, masked = whole_blocks(call)
    width, position = text.shape[1], torch.arange(text.shape[1])
    # A row of `reveal` is a block: [R, number * K] and [R * number, K] lie alike in memory.
    shape, left = (len(text) * width // size, size), masked.view(-1, size).sum(1).numpy()
    token_logits = network(count.tolist(), clean=text)
    hidden = masked.flatten().nonzero().squeeze(1)
    # [R, 1], [R, L], [R, L] and long [M] into R*L, on the device.
    ends, text, masked, hidden = (x.to(call.device, non_blocking=True) for x in (
        (lengths - 1)[:, None], text, masked, hidden))
    noisy = text.masked_fill(masked, mask_id(vocab_size))
    per_token, order = torch.zeros(text.shape, device=text.device), torch.full_like(text, -1)

    def predict(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return confidence_and_score(token_logits(noisy, hidden), text.take(hidden))

    for step, revealed in enumerate(reveal(predict, hidden, left, shape)):
        places = revealed.places
        per_token = scatter_flat(per_token, places, revealed.found)
        order = scatter_flat(order, places, step)
        noisy = scatter_flat(noisy, places, text.take(places))
    order = torch.where(order < 0, order, order + position.to(order.device) // size * size)
    # What stands after EOT is no token of the caption.
    fill = torch.arange(width, device=text.device) > ends
    per_token = per_token.masked_fill(fill, 0).scatter_add(1, ends, (per_token * fill).sum(1, keepdim=True))
    missing = (0, text_length - width)  # below 0 it cuts
    order = F.pad(order.masked_fill(fill, -1), missing, value=-1)
    return Likelihood(per_token.sum(1), F.pad(per_token, missing), order)
