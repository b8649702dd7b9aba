"""Autoregressive decoding (ARC): beam search, greedy search (one beam) and sampling, with a key/value cache.

The searches know the network by one function, `StepLogits`: logits of the next token, given what stands in every row.
They can therefore be run on a table written by hand, or without the cache.

Dimensions: B images, K beams, R rows (R/B consecutive rows per image), n tokens so far (SOT included), V vocabulary.
"""
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .decoder import ImageKV
from .tokens import PAD_ID, caption_lengths, eot_id, sot_id

if TYPE_CHECKING:
    from .model import Captioner

# (text [R, n], parent [R]) -> [R, V]; row r continues row parent[r] of the call before, so that a cache can follow.
StepLogits = Callable[[Tensor, Tensor], Tensor]


def cached_step_logits(model: "Captioner", image_kv: ImageKV) -> StepLogits:
    """The model's `StepLogits`, for one search: computes the newest token only and remembers the others."""
    past = None

    def step_logits(text: Tensor, parent: Tensor) -> Tensor:
        nonlocal past
        if past is not None:
            past = [(k[parent], v[parent]) for k, v in past]
        hidden, past = model.text.step(text[:, -1], image_kv, past)
        return model.text.output(hidden)

    return step_logits


def sample_tokens(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None,
                  generator: torch.Generator | None = None) -> Tensor:
    """One token per row, drawn by the Gumbel-max trick in float64 (float32 noise draws rare tokens too rarely).

    Args:
        logits: [M, V].
        temperature: > 0; divides the logits before anything is cut off.
        top_k: keep the k most probable tokens.
        top_p: of these, keep the fewest that together have probability p or more (nucleus sampling).
        generator: of the logits' device; the global one if None.

    Returns:
        long [M].

    Raises:
        ValueError: if an argument is out of range.
    """
    if temperature <= 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"sampling needs temperature > 0, top_k >= 1 and 0 < top_p <= 1; "
                         f"not {temperature}, {top_k}, {top_p}")
    logits = logits.double() / temperature
    if top_k is not None and top_k < logits.shape[1]:
        kept, index = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(1, index, kept)
    if top_p is not None:
        probability, index = logits.softmax(1).sort(dim=1, descending=True)
        before = probability.cumsum(1) - probability
        logits = logits.masked_fill(torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, before >= top_p),
                                    -torch.inf)
    return (logits - torch.empty_like(logits).exponential_(generator=generator).log()).argmax(1)


def next_log_probs(step_logits: StepLogits, text: Tensor, parent: Tensor, vocab_size: int, is_last: bool) -> Tensor:
    """Log-probabilities of the next token, float32 [R, V]; -inf for SOT, and for all but EOT at the last step.

    What is left is not normalised anew: the sum over a caption stays its log-likelihood under the model.
    """
    log_probs = step_logits(text, parent).float().log_softmax(1)
    eot = log_probs[:, eot_id(vocab_size)].clone()
    log_probs[:, slice(None) if is_last else sot_id(vocab_size)] = -torch.inf
    log_probs[:, eot_id(vocab_size)] = eot
    return log_probs


def beam_search(
        step_logits: StepLogits,
        batch_size: int,
        vocab_size: int,
        max_length: int,
        num_beams: int = 6,
        length_penalty: float = 0.0,
        device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """The most likely captions that a beam finds; one beam is greedy search.

    A caption is finished when ending it is among the image's K best continuations. The search stops when no beam can
    overtake the best finished caption any more, which is certain, as log-likelihoods only fall.

    Args:
        max_length: tokens between SOT and EOT at most; a beam of that length is ended by EOT.
        num_beams: K.
        length_penalty: captions are compared by log-likelihood / (tokens with EOT)^length_penalty: 0 compares the
            log-likelihood, which favours short captions, 1 the mean over tokens.

    Returns:
        text: SOT to EOT, then padding, long [B, max_length + 2].
        score: log-likelihood of the caption with its EOT (never length-normalised), float32 [B].
    """
    if num_beams < 1 or max_length < 0 or length_penalty < 0:
        raise ValueError(f"beam search needs num_beams >= 1, max_length >= 0 and length_penalty >= 0; "
                         f"not {num_beams}, {max_length}, {length_penalty}")
    eot = eot_id(vocab_size)
    image = torch.arange(batch_size, device=device)
    text = torch.full((batch_size, 1), sot_id(vocab_size), device=device)
    parent = image
    live = torch.zeros(batch_size, 1, device=device)  # log-likelihoods of the beams, [B, R/B]
    best_text = torch.full((batch_size, max_length + 2), PAD_ID, device=device)
    best_score = torch.full((batch_size,), -torch.inf, device=device)
    best_value = best_score.clone()  # score, length-normalised

    for length in range(1, max_length + 2):  # of the captions that this step ends, with EOT
        log_probs = next_log_probs(step_logits, text, parent, vocab_size, is_last=length > max_length)
        total = (live[..., None] + log_probs.view(*live.shape, vocab_size)).flatten(1)
        # Every beam has one continuation by EOT, so that K that go on are among the first 2K.
        score, choice = total.topk(min(2 * num_beams, total.shape[1]))
        row = image[:, None] * live.shape[1] + choice // vocab_size
        token = choice % vocab_size
        ends = token == eot

        ended, which = score[:, :num_beams].masked_fill(~ends[:, :num_beams], -torch.inf).max(1)
        value = ended / length ** length_penalty
        better = value > best_value
        best_value = torch.where(better, value, best_value)
        best_score = torch.where(better, ended, best_score)
        best_text[better, :length] = text[row[image, which]][better]
        best_text[better, length] = eot

        goes_on = ends.long().argsort(dim=1, stable=True)[:, :num_beams]  # sorted still: the best first
        live = score.gather(1, goes_on).masked_fill(ends.gather(1, goes_on), -torch.inf)
        if (best_value >= live[:, 0] / (max_length + 1) ** length_penalty).all():
            break
        parent = row.gather(1, goes_on).flatten()
        text = torch.cat((text[parent], token.gather(1, goes_on).view(-1, 1)), dim=1)
    return best_text, best_score


def sample(
        step_logits: StepLogits,
        batch_size: int,
        vocab_size: int,
        max_length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """One caption per image, drawn token by token.

    Args:
        max_length: tokens between SOT and EOT at most; then EOT follows.
        temperature, top_k, top_p, generator: see `sample_tokens`.

    Returns:
        text: SOT to EOT, then padding, long [B, max_length + 2].
        score: log-likelihood of the caption with its EOT under the model itself (no temperature), float32 [B].
    """
    rows = torch.arange(batch_size, device=device)
    text = torch.full((batch_size, 1), sot_id(vocab_size), device=device)
    score = torch.zeros(batch_size, device=device)
    going = torch.ones(batch_size, dtype=torch.bool, device=device)
    for length in range(1, max_length + 2):
        log_probs = next_log_probs(step_logits, text, rows, vocab_size, is_last=length > max_length)
        token = sample_tokens(log_probs, temperature, top_k, top_p, generator).where(going, PAD_ID)
        score += log_probs[rows, token].where(going, 0.0)
        text = torch.cat((text, token[:, None]), dim=1)
        going = going & (token != eot_id(vocab_size))
        if not going.any():
            break
    return F.pad(text, (0, max_length + 2 - text.shape[1]), value=PAD_ID), score


def search_images(
        model: "Captioner",
        image: Tensor,
        length: int | str = "auto",
        num_beams: int = 6,
        length_penalty: float = 0.0,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
) -> Tensor:
    """Captions of images by a model that reads left to right; the images are encoded and projected once.

    Args:
        image: [B, 3, height, width], preprocessed.
        length: tokens before EOT at most; "auto" is what the context holds. The model itself ends its captions.
        num_beams, length_penalty: see `beam_search`; not used when sampling.
        temperature: 0 is beam search; more is sampling, with top_k, top_p and generator (`sample_tokens`).

    Returns:
        ids from SOT to EOT, then padding, long [B, L] with the longest caption's L.

    Raises:
        ValueError: if an argument is out of range.
    """
    longest = model.context_length - 2
    max_length = longest if length == "auto" else length
    if not isinstance(max_length, int) or not 1 <= max_length <= longest:
        raise ValueError(f"length is {length!r}; it must be 'auto' or a number of tokens from 1 to {longest}")
    image_kv = model.text.project_image(model.encode_image_tokens(image))
    args = (cached_step_logits(model, image_kv), len(image), model.vocab_size, max_length)
    text, _ = sample(*args, temperature, top_k, top_p, generator, image.device) if temperature else \
        beam_search(*args, num_beams, length_penalty, image.device)
    return text[:, :caption_lengths(text, model.vocab_size).max()]
