"""Masked diffusion decoding: reveal [MASK] tokens in the order of the model's confidence (Eq. 6, Sec. 3.2).

`generate.unmask_images` runs this on images. To reveal the most confident positions of a fully masked caption is
MaskGIT's decoding (Chang et al. 2022), which LLaDA uses, too (Nie et al. 2025).

`reveal` decides what comes next. Decoding writes a token of its own there, and the heuristic score the true one
(`likelihood/exact.py`).

Dimensions: R captions (rows), L positions, M masked tokens of all rows, n of them that a step reveals, K candidate
tokens, V vocabulary. A place is an index into R*L: row r, position i is place r * L + i. `hidden` has M places.
"""
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from ..models.captioner import Captioner
from ..models.interface import Network, TokenLogits
from ..text.packing import of_token, partition_indices, scatter_flat
from ..text.special_tokens import PAD_ID, eot_id, mask_id, no_whole_ids, sot_id, valid_tokens, words_and_marks
from .clip_guidance import Guide
from .options import MASKS, Unmasking
from .sampling import Decoded, sample_tokens

SURE = 0.95  # of a word beside itself. The packaged captioner was at most .86 sure of one that should not be there


class Revealed(NamedTuple):
    """The tokens that one step reveals, and what was predicted before it."""

    hidden: Tensor  # long [M], the places that were masked before the step
    predicted: Tensor  # [M, ...], what was predicted at them
    places: Tensor  # long [n], those that the step reveals
    found: Tensor  # [n, ...], what was predicted at these


def reveal(predict: Callable[[Tensor], tuple[Tensor, Tensor]], hidden: Tensor, left: np.ndarray,
           shape: tuple[int, int], tokens_per_step: int | float = 1) -> Iterator[Revealed]:
    """Yield what each step reveals, until nothing is masked. The caller writes these tokens before the next step.

    Args:
        predict: takes `hidden`. Returns the logarithm of each place's confidence, [M], and predictions, [M, ...].
        hidden: the masked places, long [M], ascending.
        left: number of masked tokens of each row, long [R].
        shape: R, L.
        tokens_per_step: k reveals the k most confident places of a row, the leftmost of equal ones. A float p reveals
            the most confident one, and all others with confidence p or more. The host waits for the device only then.
    """
    by_probability = isinstance(tokens_per_step, float)
    count = 1 if by_probability else tokens_per_step
    unknown = torch.full(shape, -torch.inf, device=hidden.device)
    nowhere = torch.zeros(shape, dtype=torch.bool, device=hidden.device)
    while len(hidden):
        log_confidence, predicted = predict(hidden)
        # [R, L], -inf where nothing is masked: such a place comes last.
        confidence = scatter_flat(unknown, hidden, log_confidence)
        # [R, k] positions. A stable sort takes the leftmost of equals.
        best = confidence.argsort(dim=1, descending=True, stable=True)[:, :count]
        # [R, L], True at the places to reveal.
        chosen = nowhere.scatter(1, best, True)
        if by_probability:
            chosen = chosen | (confidence.exp() >= tokens_per_step)
        # [M]. A row with fewer than k masks chose places without one, too. They are not in `hidden`, so they drop out.
        chosen = chosen.take(hidden)
        if by_probability:
            number = int(chosen.sum())
        else:
            # The host knows n without asking the device.
            number = int(np.minimum(left, count).sum())
            left = np.maximum(left - count, 0)
        # [n] and [M - n], ascending both.
        which, rest = partition_indices(chosen, number)
        yield Revealed(hidden, predicted, hidden.index_select(0, which), predicted.index_select(0, which))
        hidden = hidden.index_select(0, rest)


@torch.no_grad()
def unmask_by_confidence(network: Network, text: Tensor, vocab_size: int, options: Unmasking,
                         forbidden: Sequence[int] = (), valid: Tensor | None = None,
                         reweigh: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
                         device: Device = None) -> Decoded:
    """Fill in every [MASK] by a bidirectional network, most confident first. A revealed token never changes (Eq. 6).

    Each step computes logits of the masked positions only, and reveals what `reveal` chooses by the probability of each
    position's best token. The paper's decoding is k = 1 and greedy. A probability p is Fast-dLLM's (Wu et al. 2025).

    Confidence is that of the distribution, not of the drawn token, so k = 1 at temperature 1 samples from the model.
    (To draw at all positions and keep the most probable draw, as MaskGIT and LLaDA do, favours probable tokens.)

    Args:
        text: long [R, L], mask_id at the tokens to fill in.
        options: `tokens_per_step`, `repeats` and `sampling` are read.
        forbidden: ids that must not be chosen. The rest is not renormalised.
        valid: bool [R, L], False at padding. By default True up to EOT.
        reweigh: takes log p [n, V], captions [R, L] without masks, and the places [n]. Returns the log p to choose
            tokens by. The order of positions and `log_prob` stay the network's.
        device: the network's device, by default the text's. For a text on the CPU and an int k, no step waits for it.

    Raises ValueError if a [MASK] is in the padding.
    """
    # [R, L] each. They are counted where the text is: on the CPU, if no step should wait for the device.
    masked, valid = text == mask_id(vocab_size), valid_tokens(text, vocab_size) if valid is None else valid
    lengths, left, misplaced = torch.stack((valid.sum(1), masked.sum(1), (masked & ~valid).sum(1))).cpu().numpy()
    if misplaced.any():
        raise ValueError("a [MASK] stands in the padding, after the caption's end")

    token_logits = network(lengths.tolist())
    text, masked, forbidden, words = (x.to(device or text.device, non_blocking=True) for x in (
        text, masked, torch.tensor(forbidden, dtype=torch.long), words_and_marks(vocab_size)))
    # From here on L is the longest caption's. The padding after it comes back at the end.
    text, padding = text.tensor_split([int(lengths.max())], dim=1)
    step, log_prob = torch.full_like(text, -1), torch.zeros(text.shape, device=text.device)

    def predict(hidden: Tensor) -> tuple[Tensor, Tensor]:
        # [M, V]. `text` is that of this step, as the loop below replaces it.
        allowed = token_logits(text, hidden).log_softmax(1).index_fill(1, forbidden, -torch.inf)
        if options.repeats == "avoid":
            allowed = without_neighbours(allowed, text, hidden, words)
        return allowed.amax(1), allowed

    # [M], all masked places.
    hidden, _ = partition_indices(masked[:, :text.shape[1]], int(left.sum()))
    for number, revealed in enumerate(reveal(predict, hidden, left, text.shape, options.tokens_per_step)):
        # [n, V], log p at the places that this step reveals.
        places, allowed = revealed.places, revealed.found
        weighed = allowed
        if reweigh is not None:
            # A guide reads whole captions, so masks that stay hidden are filled in for it.
            filled = scatter_flat(text, revealed.hidden, revealed.predicted.argmax(1))
            weighed = reweigh(allowed, filled, places)
        # [n], one token for each place.
        token = sample_tokens(weighed, options.sampling)
        text = scatter_flat(text, places, token)
        log_prob = scatter_flat(log_prob, places, of_token(allowed, token))
        step = scatter_flat(step, places, number)
    return Decoded(text, step, log_prob).padded(padding)


def by_confidence(model: Captioner, network: Network, text: Tensor, options: Unmasking, guide: Guide | None) -> Decoded:
    """Unmask captions [R, L] by the most confident token first (Eq. 6). A guide reweights tokens of each step."""
    weigh = None
    if guide is not None and guide.scale != 0 and guide.top_k > 1:
        weigh = partial(reweigh, guide=partial(guide, captions_per_image=len(text) // len(guide.known)),
                        top_k=guide.top_k)
    return unmask_by_confidence(network, text, model.vocab_size, options, reweigh=weigh,
                                forbidden=(sot_id(model.vocab_size), eot_id(model.vocab_size)),
                                device=model.text.output.weight.device)


def without_neighbours(log_prob: Tensor, text: Tensor, places: Tensor, words: Tensor) -> Tensor:
    """Return log p [M, V] without the words that stand revealed to the left and right of each place.

    Two places may both want a word ("a dog is is running"). The first to be revealed takes it, the other one its next
    best. The rest is not renormalised, so that such a place counts as unsure and comes late. Two things may stand twice
    in a row: digits ("200"), and a word that its place is SURE of although it sees its neighbour ("bye bye").

    Args:
        text: long [R, L].
        places: those of the M tokens, long [M].
        words: bool [V], True at what is avoided (`words_and_marks`).
    """
    # The ends of a row have one neighbour, and [MASK] is none. SOT stands for no neighbour, as no caption has it.
    nothing = sot_id(len(words))
    # [R, L] -> [R, L + 2] -> windows of three [R, L, 3] -> their outer two [R, L, 2] -> those of the places [M, 2].
    beside = F.pad(text, (1, 1), value=nothing).unfold(1, 3, 1)[..., ::2].flatten(0, 1).index_select(0, places)
    beside = beside.where(beside != mask_id(len(words)), nothing)
    # [M, 2], what each place itself thinks of its neighbours' tokens.
    own = log_prob.gather(1, beside)
    return log_prob.scatter(1, beside, own.where(~words[beside] | (own >= math.log(SURE)), -torch.inf))


def reweigh(log_prob: Tensor, filled: Tensor, places: Tensor, guide: Callable[[Tensor, Tensor], Tensor],
            top_k: int) -> Tensor:
    """Return log p [M, V] after the guide has redistributed the probability of the `top_k` most probable tokens.

    Args:
        log_prob: log p [M, V] of the network.
        filled: long [R, L], captions whose masks are filled in with the most probable tokens of this step.
        places: those of the M tokens, long [M].
        guide: takes complete captions, long [M, K, L], and their rows, long [M]. Returns what to add to log p, [M, K].
    """
    # [M, K] each.
    value, token = log_prob.topk(min(top_k, log_prob.shape[1]), dim=1)
    # The guide sees no forbidden token, but the best one twice.
    possible = torch.where(value == -torch.inf, token[:, :1], token)
    row, column = places // filled.shape[1], places % filled.shape[1]
    # [M, K, L], each caption with one candidate at its place.
    captions = filled[row][:, None].repeat(1, token.shape[1], 1).scatter(
        2, column[:, None, None].expand(*token.shape, 1), possible[..., None])
    guided = value + guide(captions, row)
    # The K tokens share the probability that they had.
    guided = guided + (value.logsumexp(1) - guided.logsumexp(1))[:, None]
    return log_prob.scatter(1, token, guided)


def fully_masked(lengths: Tensor, vocab_size: int, longest: int | None = None) -> Tensor:
    """Return SOT, `lengths` [B] masks, EOT and padding: long [B, L]. `longest` is L - 2, by default lengths.max().

    A length of -1 gives a row with only EOT, which costs one token.
    """
    position = torch.arange((int(lengths.max()) if longest is None else longest) + 2, device=lengths.device)
    end = lengths[:, None] + 1
    text = torch.full((len(lengths), len(position)), PAD_ID, device=lengths.device)
    text = text.masked_fill(position < end, mask_id(vocab_size))
    text[:, 0] = sot_id(vocab_size)
    return text.masked_fill(position == end, eot_id(vocab_size))


def tokenize_with_masks(tokenizer: Callable, templates: str | list[str], context_length: int | None = None) -> Tensor:
    """Return ids, long [B, context_length], of captions with gaps such as "a [MASK] dog on a [MASK]".

    One [MASK], in any spelling of `options.MASKS`, is one token. Raises ValueError if a template is longer than the
    context, or holds <start_of_text> or <end_of_text>.
    """
    context_length = context_length or tokenizer.context_length
    templates = [templates] if isinstance(templates, str) else templates
    text = torch.full((len(templates), context_length), PAD_ID)
    for row, template in zip(text, templates, strict=True):
        ids = []
        for i, part in enumerate(MASKS.split(template)):
            ids += [mask_id(tokenizer.vocab_size)] * (i > 0) + tokenizer.encode(part)
        if why := no_whole_ids(ids, tokenizer.vocab_size, context_length):
            raise ValueError(f"{template[:40]!r}... {why}")
        ids = [sot_id(tokenizer.vocab_size), *ids, eot_id(tokenizer.vocab_size)]
        row[:len(ids)] = torch.tensor(ids)
    return text


def guided(conditional: Network, uncond: Network, scale: float, kl: list[Tensor] | None = None) -> Network:
    """Return a network with classifier-free guidance (Ho & Salimans 2022): uncond + scale * (conditional - uncond).

    The networks are combined in log p(x_0). More than 1 follows the image more closely. `uncond` sees the null image,
    or an image with masked features (MC-Diffusion's Masked Condition Strategy). This scale is MC-Diffusion's w as its
    text describes it. Its Definition 2 as printed, w * uncond + (1 - w) * conditional, has scale 1 - w.

    Args: each call appends to `kl` the KL divergence of guided from conditional predictions, float32 [M], in nats.
    """
    def network(lengths: Sequence[int]) -> TokenLogits:
        cond_logits, uncond_logits = conditional(lengths), uncond(lengths)

        def token_logits(text: Tensor, predicted: Tensor, *time: Tensor) -> Tensor:
            cond, null = (logits(text, predicted, *time).log_softmax(1) for logits in (cond_logits, uncond_logits))
            combined = null + scale * (cond - null)
            if kl is not None:
                kl.append(F.kl_div(cond, combined.log_softmax(1), reduction="none", log_target=True).sum(1))
            return combined

        return token_logits

    return network
