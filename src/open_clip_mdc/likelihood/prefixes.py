"""Captions of an image as trees of their prefixes, so that a causal model reads a common beginning once (Eq. 7).

A row of the decoder holds the distinct prefixes of some captions, as one token each, which sees those it begins with.

Dimensions: R captions (R/B consecutive ones per image), L positions, M tokens that are asked for, G rows of GROUP
captions of an image, T prefixes of a row, D of all rows, V vocabulary.
"""
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .scoring import Call

GROUP = 16  # captions of a row. More would share more and attend to more
WORTH = 0.6  # the largest share of tokens that may be left. For more, attention to a tree takes what they save


class Prefixes(NamedTuple):
    text: np.ndarray  # long [G, T], the last token of each prefix
    position: Tensor  # long [G, T], its position in the caption
    sight: Tensor  # bool [G, T, T], True where a prefix begins with another one, or is it
    count: np.ndarray  # long [G], the prefixes of a row, at least one
    before: np.ndarray  # long [M] into G*T, the prefix before each token that is asked for, caption by caption


def shared_prefixes(call: Call, lengths: np.ndarray) -> Prefixes | None:
    """Return the prefixes of the call's captions, or None if too few are common to captions of an image.

    `lengths` [R] counts the tokens with SOT and EOT. EOT is asked for and never read.
    """
    width = lengths.max()
    text = call.text[:, :width].numpy()
    order = np.lexsort((*text.T[::-1], call.image)).reshape(call.num_images, -1)
    order = np.pad(order, ((0, 0), (0, -order.shape[1] % GROUP)), constant_values=-1).reshape(-1, GROUP)
    # [G, GROUP, L]: what is read, and what the caption before does not begin with. Index -1 is no caption.
    valid = np.arange(width) < np.where(order < 0, 0, lengths[order] - 1)[..., None]
    ids, new = text[order], valid.copy()
    new[:, 1:] &= ~np.logical_and.accumulate(valid[:, :-1] & (ids[:, 1:] == ids[:, :-1]), axis=2)
    count = new.sum((1, 2))
    if count.sum() > WORTH * lengths[lengths > 1].sum():
        return None
    number = np.where(new, new.reshape(len(new), -1).cumsum(1).reshape(new.shape) - 1, -1)
    node = np.maximum.accumulate(number, axis=1)  # [G, GROUP, L], the prefix that ends with each token
    found, position = np.zeros((2, len(count), max(1, count.max())), dtype=int)
    row, _, place = new.nonzero()
    found[row, number[new]], position[row, number[new]] = ids[new], place
    sight = np.zeros((*found.shape, found.shape[1]), dtype=bool)
    query, key = np.tril_indices(width)
    row, caption, pair = valid[..., query].nonzero()
    sight[row, node[row, caption, query[pair]], node[row, caption, key[pair]]] = True
    # [R, L], the place of the prefix that ends with each token, or -1.
    end, place = np.full_like(text, -1), np.arange(len(count))[:, None, None] * found.shape[1] + node
    end[order[order >= 0]] = np.where(valid, place, -1)[order >= 0]
    return Prefixes(found, torch.from_numpy(position), torch.from_numpy(sight), count.clip(1), end[end >= 0])


def prefix_logits(call: Call, tree: Prefixes) -> tuple[Tensor, Tensor]:
    """Return float32 logits [D, V] after all prefixes, and which of them each token that is asked for has, long [M]."""
    asked, which = np.unique(tree.before, return_inverse=True)
    text, asked, which = map(call.to_device, (tree.text, asked, which))
    return call.network(tree.count, causal=False, position=tree.position, sight=tree.sight)(text, asked), which
