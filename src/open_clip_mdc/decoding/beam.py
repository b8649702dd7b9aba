"""Autoregressive decoding (ARC): beam search, greedy search (one beam) and sampling.

`generate.search_images` runs these on images, with a key/value cache.

Dimensions: B images, K beams, R rows (R/B consecutive rows per image), n tokens so far (with SOT), V vocabulary.
"""
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from ..models.interface import StepLogits
from ..text.special_tokens import PAD_ID, eot_id, sot_id, target_tokens
from .options import Sampling
from .sampling import Decoded, sample_tokens


def next_log_probs(step_logits: StepLogits, text: Tensor, parent: Tensor, vocab_size: int, min_length: int,
                   max_length: int) -> Tensor:
    """Return log-probabilities of the next token, float32 [R, V], with -inf for tokens that the lengths rule out.

    The rest is not renormalised, so their sum over a caption is the caption's log-likelihood (Eq. 7).
    """
    log_probs = step_logits(text, parent).float().log_softmax(1)
    tokens = text.shape[1] - 1  # so far, without SOT
    eot = log_probs[:, eot_id(vocab_size)].clone()
    log_probs[:, slice(None) if tokens == max_length else sot_id(vocab_size)] = -torch.inf
    log_probs[:, eot_id(vocab_size)] = eot if tokens >= min_length else -torch.inf
    return log_probs


def check_search(min_length: int, max_length: int, num_beams: int = 1) -> None:
    if not 0 <= min_length <= max_length:
        raise ValueError(f"a caption cannot have at least {min_length} and at most {max_length} tokens: give "
                         "0 <= min_length <= max_length")
    if num_beams < 1:
        raise ValueError(f"beam search needs num_beams >= 1, not {num_beams}")


def in_reading_order(text: Tensor, log_prob: Tensor, vocab_size: int) -> Decoded:
    step = torch.arange(-1, text.shape[1] - 1, device=text.device).expand_as(text)
    return Decoded(text, step.where(target_tokens(text, vocab_size), -1), log_prob)


def beam_search(step_logits: StepLogits, batch_size: int, vocab_size: int, max_length: int, num_beams: int = 6,
                device: Device = "cpu", min_length: int = 0) -> Decoded:
    """Search for each image's most likely caption with a beam. One beam is greedy search.

    A caption is finished when EOT is among the image's K best continuations. The search stops when no beam can overtake
    the best finished caption. As log-likelihoods only fall, this is exact.
    Returns SOT to EOT, then padding, [B, max_length + 2]. Lengths count the tokens between SOT and EOT.
    """
    check_search(min_length, max_length, num_beams)
    eot = eot_id(vocab_size)
    image = torch.arange(batch_size, device=device)
    text = torch.full((batch_size, 1), sot_id(vocab_size), device=device)
    log_prob = torch.zeros(batch_size, 1, device=device)  # of each token of `text`
    parent = image
    live = torch.zeros(batch_size, 1, device=device)  # log-likelihood of each beam, [B, R/B]
    best_text = torch.full((batch_size, max_length + 2), PAD_ID, device=device)
    best_log_prob = torch.zeros(best_text.shape, device=device)
    best_score = torch.full((batch_size,), -torch.inf, device=device)

    for length in range(1, max_length + 2):  # of captions that end at this step, with EOT
        log_probs = next_log_probs(step_logits, text, parent, vocab_size, min_length, max_length)
        # [B, K * V], then the K best of an image: their beams (rows of `text`) and tokens, [B, K] each.
        total = (live[..., None] + log_probs.view(*live.shape, vocab_size)).flatten(1)
        score, choice = total.topk(min(num_beams, total.shape[1]))
        row = image[:, None] * live.shape[1] + choice // vocab_size
        token = choice % vocab_size
        ends = token == eot

        # The best of those that end now, [B], replaces the image's best caption if it is better.
        ended, which = score.masked_fill(~ends, -torch.inf).max(1)
        better = (ended > best_score)[:, None]
        best_score = torch.maximum(best_score, ended)
        last = row[image, which]
        ended_log_prob = torch.cat((log_prob[last], log_probs[last, eot, None]), 1)
        best_text[:, :length + 1] = F.pad(text[last], (0, 1), value=eot).where(better, best_text[:, :length + 1])
        best_log_prob[:, :length + 1] = ended_log_prob.where(better, best_log_prob[:, :length + 1])

        # A beam that lost its place to an ended caption cannot overtake it.
        live = score.masked_fill(ends, -torch.inf)
        # The host waits for the device only here.
        if (best_score >= live.amax(1)).all():
            break
        parent, newest = row.flatten(), token.flatten()
        text = torch.cat((text[parent], newest[:, None]), dim=1)
        log_prob = torch.cat((log_prob[parent], log_probs[parent, newest][:, None]), dim=1)
    return in_reading_order(best_text, best_log_prob, vocab_size)


def sample(step_logits: StepLogits, batch_size: int, vocab_size: int, max_length: int, sampling: Sampling,
           device: Device = "cpu", min_length: int = 0) -> Decoded:
    """Draw one caption per image, token by token. Lengths and result are those of `beam_search`."""
    check_search(min_length, max_length)
    rows = torch.arange(batch_size, device=device)
    text = torch.full((batch_size, 1), sot_id(vocab_size), device=device)
    log_prob = torch.zeros(batch_size, 1, device=device)
    going = torch.ones(batch_size, dtype=torch.bool, device=device)
    for _ in range(max_length + 1):
        log_probs = next_log_probs(step_logits, text, rows, vocab_size, min_length, max_length)
        token = sample_tokens(log_probs, sampling).where(going, PAD_ID)
        text = torch.cat((text, token[:, None]), dim=1)
        log_prob = torch.cat((log_prob, log_probs[rows, token].where(going, 0.0)[:, None]), dim=1)
        going = going & (token != eot_id(vocab_size))
        if not going.any():
            break
    missing = (0, max_length + 2 - text.shape[1])
    return in_reading_order(F.pad(text, missing, value=PAD_ID), F.pad(log_prob, missing), vocab_size)
