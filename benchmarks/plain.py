"""Decode and score in the simplest way, as a baseline for decoding.py and scoring.py.

The image is encoded and projected once. Every step and every draw then decodes all 77 positions and computes
log-probabilities over the vocabulary at each. Dimensions: C candidates, R captions, L = 77 positions, V vocabulary.
"""
import torch
from torch import Tensor

from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.models.decoder import ImageKV
from open_clip_mdc.text.packing import Packed
from open_clip_mdc.text.special_tokens import eot_id, mask_id, sot_id, target_tokens, valid_tokens


@torch.no_grad()
def encode(model: Captioner, image: Tensor) -> ImageKV:
    return model.text.project_image(model.encode_image_tokens(image))


def log_probs(model: Captioner, image_kv: ImageKV, text: Tensor, valid: Tensor) -> Tensor:
    image_kv = [(k.expand(len(text), -1, -1, -1), v.expand(len(text), -1, -1, -1)) for k, v in image_kv]
    position = torch.arange(text.shape[1], device=text.device).repeat(len(text))
    hidden = model.text(Packed(text.flatten(), position, None, valid, True, model.causal), image_kv)
    return model.text.output(hidden).view(*text.shape, -1).log_softmax(-1)


@torch.no_grad()
def unmask(model: Captioner, image: Tensor, length: int, steps: int) -> Tensor:
    """Return captions of `length` tokens after the first `steps` of Eq. 6, ids [R, L]."""
    vocab_size = model.vocab_size
    text = torch.zeros(len(image), model.context_length, dtype=torch.long)
    text[:, 0], text[:, 1:length + 1], text[:, length + 1] = sot_id(vocab_size), mask_id(vocab_size), eot_id(vocab_size)
    valid, rows = valid_tokens(text, vocab_size), torch.arange(len(image))
    image_kv = encode(model, image)
    for _ in range(steps):
        highest, token = log_probs(model, image_kv, text, valid)[..., :sot_id(vocab_size)].max(-1)
        best = highest.masked_fill(text != mask_id(vocab_size), -torch.inf).argmax(1)
        text[rows, best] = token[rows, best]
    return text


@torch.no_grad()
def heuristic(model: Captioner, image: Tensor, text: Tensor) -> Tensor:
    """Return the paper's heuristic likelihood, [C], of captions [C, L] for one image [3, height, width]."""
    valid, masked = valid_tokens(text, model.vocab_size), target_tokens(text, model.vocab_size)
    noisy = text.masked_fill(masked, mask_id(model.vocab_size))
    score, image_kv = torch.zeros(len(text)), encode(model, image[None])
    while masked.any():
        logs = log_probs(model, image_kv, noisy, valid)
        place = logs.amax(-1).masked_fill(~masked, -torch.inf).argmax(1)
        rows = masked.any(1).nonzero().squeeze(1)
        i = place[rows]
        score[rows] += logs[rows, i, text[rows, i]]
        noisy[rows, i] = text[rows, i]
        masked[rows, i] = False
    return score


@torch.no_grad()
def draws(model: Captioner, image: Tensor, text: Tensor, number: int) -> Tensor:
    """Return terms of Eq. 8 in nats per masked token, [C, number]. Each hides 1 to all tokens of a caption."""
    terms, image_kv = [], encode(model, image[None])
    for row in text:
        num_tokens = int(target_tokens(row, model.vocab_size).sum())
        masked = torch.zeros(number, len(row), dtype=torch.bool)
        how_many = torch.randint(1, num_tokens + 1, (number, 1))
        masked[:, 1:num_tokens + 1] = torch.rand(number, num_tokens).argsort(1) < how_many
        rows = row.expand(number, -1)
        noisy = rows.masked_fill(masked, mask_id(model.vocab_size))
        logs = log_probs(model, image_kv, noisy, valid_tokens(rows, model.vocab_size))
        of_truth = logs.gather(2, rows[..., None]).squeeze(2)
        terms.append((of_truth * masked).sum(1) / masked.sum(1))
    return torch.stack(terms)
