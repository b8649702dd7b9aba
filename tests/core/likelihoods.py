"""Compute the decoder and the likelihoods of captions in the simplest way, one caption at a time.

Dimensions: R captions (rows), L positions, P patches, H heads, W width, V vocabulary.
"""
import itertools
from functools import partial

import numpy as np
import torch
from conftest import VOCAB as V

from open_clip_mdc.text.special_tokens import eot_id, mask_id, sot_id

SOT, EOT, MASK = sot_id(V), eot_id(V), mask_id(V)


def caption(*words, length=12, padding=0):
    return [SOT, *words, EOT] + [padding] * (length - len(words) - 2)


def random_captions(count, lengths=range(2, 10), seed=0):
    """Return distinct captions of random words, of alternating lengths."""
    rng = np.random.default_rng(seed)
    lengths = itertools.cycle(lengths)
    return torch.tensor([caption(*rng.integers(1, V - 2, size=next(lengths))) for _ in range(count)])


def network(model, image):
    """Return what decoding reads: the model with the keys and values of images [B, 3, H, W]."""
    with torch.no_grad():
        return partial(model.token_logits, model.text.project_image(model.encode_image_tokens(image)))


def log_probs(model, image, text, valid):
    """[R, L, V] of captions [R, L] of one image, by the plain path."""
    with torch.no_grad():
        logits = model.logits(image.expand(len(text), -1, -1, -1), text, valid.expand(len(text), -1))
    return logits.double().log_softmax(-1)


def read(text):
    """The caption without padding and what a model may attend to."""
    length = text.tolist().index(EOT) + 1
    return text[:length], torch.ones(length, dtype=torch.bool)


def reveal(truth, mask, table_of):
    """Sec. 4.2 by a loop: (place, log p of its true token), the most confident of the masked places first.

    Args:
        truth: ids [L], of which the first is given.
        table_of: returns log p [L, V] of a text with masks.
    """
    text = truth.clone()
    text[1:] = mask
    while (hidden := (text == mask).nonzero()[:, 0]).numel():
        table = table_of(text)
        place = int(hidden[table[hidden].amax(1).argmax()])
        yield place, table[place, truth[place]].item()
        text[place] = truth[place]


def mask_values(model, image, text):
    """{hidden positions: what Eq. 8 averages} for every mask there is: 1/n times the sum over the n hidden tokens."""
    text, valid = read(text)
    masks = [m for n in range(1, len(text)) for m in itertools.combinations(range(1, len(text)), n)]
    noisy = text.repeat(len(masks), 1)
    for row, hidden in zip(noisy, masks, strict=True):
        row[list(hidden)] = MASK
    found = log_probs(model, image, noisy, valid)
    return {hidden: sum(logp[i, text[i]].item() for i in hidden) / len(hidden)
            for hidden, logp in zip(masks, found, strict=True)}


def eq_8(values, counts=None):
    """Return the sum over n of the mean over all masks of n tokens. Over some counts only, it is N times their mean.

    This is Eq. 5 with t in (0, 1], too. Its NELBO of N tokens is the integral over t of 1/t * sum over masks M of
    t^|M| (1-t)^(N-|M|) * NLL(M), and int t^(n-1) (1-t)^(N-n) dt = (n-1)! (N-n)! / N! = 1/n * 1/(masks of n tokens).
    """
    num_tokens = max(map(len, values))
    counts = counts or range(1, num_tokens + 1)
    return num_tokens * np.mean([np.mean([v for hidden, v in values.items() if len(hidden) == n]) for n in counts])


def attend(q, k, v, heads, causal):
    """Attention written out, head by head: [L, W], and its weights [H, L, L or P]."""
    out, weights = [], []
    for qh, kh, vh in zip(q.chunk(heads, -1), k.chunk(heads, -1), v.chunk(heads, -1), strict=True):
        scores = qh @ kh.T / kh.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        odds = (scores - scores.amax(1, keepdim=True)).exp()
        weights.append(odds / odds.sum(1, keepdim=True))
        out.append(weights[-1] @ vh)
    return torch.cat(out, -1), torch.stack(weights)


def naive_decoder(decoder, ids, patches, causal):
    """Hidden states [L, W] of one caption without padding, and the attention of each layer to the patches."""
    x = decoder.token_embedding(ids) + decoder.positional_embedding[:len(ids)]
    layers = []
    for block in decoder.blocks:
        x = x + block.self_out(attend(*block.self_qkv(block.ln_1(x)).chunk(3, -1), block.heads, causal)[0])
        y, weights = attend(block.cross_q(block.ln_2(x)), *block.cross_kv(patches).chunk(2, -1), block.heads, False)
        x = x + block.cross_out(y)
        x = x + block.mlp(block.ln_3(x))
        layers.append(weights)
    return decoder.ln_final(x), torch.stack(layers)
