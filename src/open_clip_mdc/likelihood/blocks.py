"""The likelihood of block diffusion: the chain rule over blocks, and the heuristic of Sec. 4.2 within each.

    log p(x) = sum over blocks b of log p(x^b | x^<b, image)

Blocks see the true tokens of those before them, so all blocks of a caption are scored at once, in as many passes as a
block has tokens. In blocks of one token this is Eq. 7. What fills the last block after EOT counts to EOT.

Dimensions: R captions, L positions, K tokens of a block, M predicted tokens, V vocabulary.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.confidence import reveal
from ..models.interface import Network
from ..objectives.blocks import filled
from ..text.packing import scatter_flat
from ..text.special_tokens import caption_lengths, mask_id
from .exact import confidence_and_score
from .scoring import Likelihood


def heuristic_in_blocks(network: Network, text: Tensor, vocab_size: int, size: int, context_length: int,
                        device: torch.device | str | None = None) -> Likelihood:
    """Return log-likelihoods of captions, long [R, L] on the CPU, in blocks of `size` tokens.

    Args:
        network: also takes the clean captions, as `Captioner.token_logits` does.
        device: the network's device, by default the text's.
    """
    lengths = caption_lengths(text, vocab_size)
    number = -(-int(lengths.max()) // size)  # of blocks
    text_length, width = text.shape[1], number * size
    text, count = filled(F.pad(text, (0, max(0, width - text_length)))[:, :width], size, vocab_size, context_length)
    position = torch.arange(width)
    masked = (position > 0) & (position < count[:, None])  # [R, L]. SOT is given
    # A row of `reveal` is a block: [R, number * K] and [R * number, K] lie alike in memory.
    shape, left = (len(text) * number, size), masked.view(-1, size).sum(1).numpy()
    token_logits = network(count.tolist(), clean=text)
    hidden = masked.flatten().nonzero().squeeze(1)
    # [R, 1], [R, L], [R, L] and long [M] into R*L, on the device.
    ends, text, masked, hidden = (x.to(device or text.device, non_blocking=True) for x in (
        (lengths - 1)[:, None], text, masked, hidden))
    noisy = text.masked_fill(masked, mask_id(vocab_size))
    per_token, order = torch.zeros(text.shape, device=text.device), torch.full_like(text, -1)

    def predict(hidden: Tensor) -> tuple[Tensor, Tensor]:
        return confidence_and_score(token_logits(noisy, hidden), text.take(hidden))

    for step, revealed in enumerate(reveal(predict, hidden, left, shape)):
        places = revealed.places
        per_token = scatter_flat(per_token, places, revealed.predicted.index_select(0, revealed.which))
        order = order.flatten().index_fill(0, places, step).view_as(order)
        noisy = scatter_flat(noisy, places, text.take(places))
    order = torch.where(order < 0, order, order + position.to(order.device) // size * size)
    # What stands after EOT is no token of the caption.
    fill = torch.arange(width, device=text.device) > ends
    per_token = per_token.masked_fill(fill, 0).scatter_add(1, ends, (per_token * fill).sum(1, keepdim=True))
    missing = (0, text_length - width)  # below 0 it cuts
    order = F.pad(order.masked_fill(fill, -1), missing, value=-1)
    return Likelihood(per_token.sum(1), F.pad(per_token, missing), order)
