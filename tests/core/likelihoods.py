"""Compute the likelihoods of captions in the simplest way, with a call of the network for each caption.

Dimensions: R captions (rows), L positions, V vocabulary.
"""
import itertools

import numpy as np
import torch
from conftest import VOCAB as V

from open_clip_mdc.text.special_tokens import eot_id, mask_id, sot_id

SOT, EOT, MASK = sot_id(V), eot_id(V), mask_id(V)


def caption(*words, length=12, padding=0):
    return [SOT, *words, EOT] + [padding] * (length - len(words) - 2)


def random_captions(count, lengths=range(2, 10), seed=0, length=12):
    """Return distinct captions of random words, of alternating lengths."""
    rng = np.random.default_rng(seed)
    lengths = itertools.cycle(lengths)
    return torch.tensor([caption(*rng.integers(1, V - 2, size=next(lengths)), length=length) for _ in range(count)])


def log_probs(model, image, text, valid):
    """[R, L, V] of captions [R, L] of one image, by the plain path."""
    with torch.no_grad():
        logits = model.logits(image.expand(len(text), -1, -1, -1), text, valid.expand(len(text), -1))
    return logits.double().log_softmax(-1)


def read(text):
    """The caption without padding and what a model may attend to."""
    length = text.tolist().index(EOT) + 1
    return text[:length], torch.ones(length, dtype=torch.bool)
