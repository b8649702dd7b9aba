"""Masked diffusion decoding: [MASK] tokens are revealed in the order of the model's confidence (Eq. 6, Sec. 3.2).

The algorithm and what it starts from; `generate.unmask_images` runs it on images. Revealing the most confident
positions of a fully masked caption is MaskGIT's decoding (Chang et al. 2022), as in LLaDA (Nie et al. 2025).

Dimensions: B captions, R rows, L positions, M masked tokens, V vocabulary.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .interface import Decoded, TokenLogits
from .sampling import GREEDY, Sampling, sample_tokens
from .tokens import PAD_ID, eot_id, mask_id, sot_id


@torch.no_grad()
def unmask_by_confidence(
        token_logits: TokenLogits,
        text: Tensor,
        valid: Tensor,
        vocab_size: int,
        tokens_per_step: int = 1,
        forbidden: Sequence[int] = (),
        sampling: Sampling = GREEDY,
) -> Decoded:
    """Replaces every [MASK], the most confident first; what is revealed stays (Eq. 6).

    Each step asks for the logits of the masked positions only, and reveals the k of each row whose most probable token
    has the highest probability, the leftmost of equals. The paper's decoding is k = 1, greedy.

    The order looks at distributions, not at drawn tokens: with k = 1 and temperature 1 this samples from the model.
    (To draw everywhere and keep the most probable draw, as MaskGIT and LLaDA do, favours probable tokens.)

    Args:
        token_logits: the network.
        text: ids, mask_id where a token is to be found, long [R, L].
        valid: bool [R, L], what is no padding.
        tokens_per_step: k.
        forbidden: ids that may not be chosen. Probabilities are not renormalised without them, so that a position whose
            most probable token is forbidden is not confident.
        sampling: how the revealed tokens are chosen.

    Raises:
        ValueError: if an argument is out of range, or padding is masked.
    """
    if tokens_per_step < 1:
        raise ValueError(f"tokens_per_step is {tokens_per_step}; every step must reveal at least one token")
    masked = text == mask_id(vocab_size)
    if (masked & ~valid).any():
        raise ValueError("a [MASK] stands in the padding, after the caption's end")

    step = torch.full_like(text, -1)
    log_prob = torch.zeros(text.shape, device=text.device)
    for number in range(-(-int(masked.sum(1).max()) // tokens_per_step)):
        allowed = token_logits(text, valid, masked).float().log_softmax(1)  # [M, V]
        allowed = allowed.index_fill(1, torch.tensor(forbidden, dtype=torch.long, device=text.device), -torch.inf)
        confidence = torch.full_like(log_prob, -torch.inf).masked_scatter(masked, allowed.amax(1))
        best = confidence.argsort(dim=1, descending=True, stable=True)[:, :tokens_per_step]
        chosen = torch.zeros_like(masked).scatter(1, best, True) & masked
        allowed = allowed[chosen[masked]]
        token = sample_tokens(allowed, sampling)
        text = text.masked_scatter(chosen, token)
        log_prob = log_prob.masked_scatter(chosen, allowed.gather(1, token[:, None]))
        step = step.masked_fill(chosen, number)
        masked = masked & ~chosen
    return Decoded(text, step, log_prob)


def fully_masked(lengths: Tensor, vocab_size: int) -> Tensor:
    """SOT, as many masks as asked for, EOT, then padding: long [B, L] from long [B]."""
    position = torch.arange(int(lengths.max()) + 2, device=lengths.device)
    end = lengths[:, None] + 1
    text = torch.full((len(lengths), len(position)), PAD_ID, device=lengths.device)
    text = text.masked_fill(position < end, mask_id(vocab_size)).masked_fill(position == end, eot_id(vocab_size))
    text[:, 0] = sot_id(vocab_size)
    return text


def tokenize_with_masks(tokenizer: Callable, templates: str | list[str], context_length: int | None = None) -> Tensor:
    """Ids of captions with gaps, "a [MASK] dog on a [MASK]": one [MASK] stands for one token.

    Args:
        tokenizer: an OpenCLIP SimpleTokenizer.
        context_length: the tokenizer's own if None.

    Returns:
        SOT to EOT, then padding, long [B, context_length].

    Raises:
        ValueError: if a template does not fit, as cutting it would lose words that were asked for.
    """
    context_length = context_length or tokenizer.context_length
    templates = [templates] if isinstance(templates, str) else templates
    text = torch.full((len(templates), context_length), PAD_ID)
    for row, template in zip(text, templates, strict=True):
        ids = [sot_id(tokenizer.vocab_size)]
        for i, part in enumerate(template.split("[MASK]")):
            ids += [mask_id(tokenizer.vocab_size)] * (i > 0) + tokenizer.encode(part)
        ids.append(eot_id(tokenizer.vocab_size))
        if len(ids) > context_length:
            raise ValueError(f"{template!r} has {len(ids)} tokens with SOT and EOT; {context_length} fit")
        row[:len(ids)] = torch.tensor(ids)
    return text


def guided(conditional: TokenLogits, blind: TokenLogits, scale: float) -> TokenLogits:
    """Classifier-free guidance (Ho & Salimans 2022) on log-probabilities: blind + scale * (conditional - blind).

    Scale 1 is the conditional model, and more leans towards what only the image explains.
    """
    def token_logits(text: Tensor, valid: Tensor, asked: Tensor) -> Tensor:
        with_image = conditional(text, valid, asked).float().log_softmax(1)
        without = blind(text, valid, asked).float().log_softmax(1)
        return without + scale * (with_image - without)

    return token_logits
