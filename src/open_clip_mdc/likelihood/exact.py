"""Likelihoods of captions by the chain rule, in reading order (Eq. 7) or in order of confidence (heuristic, Sec. 4.2).

SOT is given. All other tokens are scored, also EOT.

Dimensions: B images, C candidates of an image, R captions (R/B consecutive rows per image), L positions, N scored
tokens of a caption, M predicted tokens, V vocabulary.
"""
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..decoding.confidence import reveal
from ..text.packing import partition_indices, scatter_flat
from ..text.special_tokens import caption_lengths, mask_id, target_tokens
from .calls import distinct_logits
from .prefixes import prefix_logits, shared_prefixes
from .scoring import Call, Likelihood, Scoring


def estimated(device: torch.device, score: np.ndarray, error: np.ndarray, draws: np.ndarray,
              per_token: np.ndarray | None = None) -> Likelihood:
    tensors = (None if x is None else torch.as_tensor(x, dtype=torch.float32).to(device, non_blocking=True)
               for x in (score, per_token, None, error))
    return Likelihood(*tensors, torch.as_tensor(draws, dtype=torch.long).to(device, non_blocking=True))


def token_log_prob(logits: Tensor, true: Tensor, which: Tensor | None = None) -> Tensor:
    """Return log p of the true tokens, [M] from logits [M, V]. Those that share logits [D, V] say which are theirs."""
    which = torch.arange(len(logits), device=logits.device) if which is None else which
    return logits[which, true] - logits.logsumexp(1)[which]


def confidence_and_score(logits: Tensor, true: Tensor, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log p of the most probable token, whichever it is, and of the true one, [M] each, as `token_log_prob`."""
    which = torch.arange(len(logits), device=logits.device) if which is None else which
    log_z = logits.logsumexp(1)
    return (logits.amax(1) - log_z)[which], logits[which, true] - log_z[which]


def autoregressive(call: Call, options: Scoring) -> Likelihood:
    """Return the log-likelihood of Eq. 7: the sum of log p(c_i | c_<i, image), from the token after SOT to EOT.

    Captions of an image that begin alike may share what they begin with (`prefixes.py`), if the model can.
    """
    network, text, vocab_size = call.rows
    lengths = caption_lengths(text, vocab_size).tolist()
    tree = shared_prefixes(call, np.array(lengths)) if call.model.footprint.joins else None
    text = text.to(call.device, non_blocking=True)
    captions = text[:, :max(lengths)]
    # Long [M] into R*L. The host knows M, so that it need not ask the device.
    predicted, _ = partition_indices(target_tokens(captions, vocab_size), sum(lengths) - len(lengths))
    per_token = torch.zeros(captions.shape, device=text.device)
    if len(predicted):
        logits, which = (network(lengths, causal=True)(captions, predicted), None) if tree is None else prefix_logits(
            call, tree)
        per_token = scatter_flat(per_token, predicted, token_log_prob(logits, captions.take(predicted), which))
    return Likelihood(per_token.sum(1), F.pad(per_token, (0, text.shape[1] - captions.shape[1])))


def heuristic(call: Call, options: Scoring) -> Likelihood:
    """Return the paper's heuristic: reveal a caption in order of confidence, and sum its tokens' log-probabilities.

    A position's confidence is the highest probability in the vocabulary, even if that of the true token is lower. The
    first of equal positions is revealed. The next position depends on the revealed tokens alone, so this is a chain
    rule: given the length, the probabilities of all captions add up to 1. The score is the exact log-probability that
    decoding in order of confidence samples this caption. It is another likelihood than the one that Eq. 8 bounds.

    The host does not wait for the device. On the CPU the captions of an image that agree in all that is revealed so far
    are read once.
    """
    network, text, vocab_size = call.rows
    lengths = caption_lengths(text, vocab_size).numpy()  # [R]
    text = text.to(call.device, non_blocking=True)
    captions = text[:, :int(lengths.max())]
    # [R, L]: all but SOT are scored, so all but SOT are masked at first.
    masked = target_tokens(captions, vocab_size)
    num_masked = lengths - 1
    noisy = captions.masked_fill(masked, mask_id(vocab_size))
    per_token = torch.zeros(captions.shape, device=text.device)
    order = torch.full_like(captions, -1)
    token_logits, read = network(lengths), lengths
    # A GPU would wait for the host, which compares the rows.
    shared = len(text) > call.num_images and noisy.device == torch.device("cpu")

    def predict(hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits, which = distinct_logits(call, noisy, read, hidden) if shared else (token_logits(noisy, hidden), None)
        return confidence_and_score(logits, captions.take(hidden), which)

    hidden, _ = partition_indices(masked, int(num_masked.sum()))
    for step, revealed in enumerate(reveal(predict, hidden, num_masked, captions.shape)):
        places = revealed.places
        per_token = scatter_flat(per_token, places, revealed.found)
        order = scatter_flat(order, places, step)
        # Decoding would write a token of its own here. Scoring writes the true one.
        noisy = scatter_flat(noisy, places, captions.take(places))
        unfinished = num_masked > step + 1
        # A finished row is cut to its SOT, which costs one token, and keeps its index.
        read = np.where(unfinished, lengths, 1)
        if not shared and unfinished.any() and (num_masked == step + 1).any():
            token_logits = network(read)
    padding = (0, text.shape[1] - captions.shape[1])
    return Likelihood(per_token.sum(1), F.pad(per_token, padding), F.pad(order, padding, value=-1))
