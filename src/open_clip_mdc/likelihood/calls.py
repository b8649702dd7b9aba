"""Decoder calls for rows of any number and length, and rows of an image that are equal and so are read once.

Captions of one length share steps of the heuristic until a revealed token differs. The host compares them.

Dimensions: B images, J or R rows, L positions, M predicted tokens, D distinct ones of them, V vocabulary.
"""
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..models.interface import TokenLogits
from .scoring import Call


def decoder_calls(call: Call, image: np.ndarray, length: np.ndarray) -> Iterator[tuple[np.ndarray, TokenLogits]]:
    """Split J rows into decoder calls, each with equally many rows of all images, at least one.

    Args: `image` and `length` are of each row, long [J]. Images ascend.

    Yields the indices of a call's rows, long [R], and the call's `TokenLogits` for texts [R, longest]. An index of -1
    is a row of one token that fills up an image with fewer rows than the others.
    """
    count = np.bincount(image, minlength=call.num_images)  # [B]
    number = np.arange(count.max())
    # [B, rows], -1 where an image has fewer rows than the others.
    rows = np.where(number < count[:, None], (count.cumsum() - count)[:, None] + number, -1)
    step = max(1, call.max_tokens // int(length.max()) // call.num_images)
    for part in np.split(rows, range(step, rows.shape[1], step), axis=1):
        yield part.ravel(), call.network(np.where(part >= 0, length[part], 1).ravel())


def score_draws(call: Call, image: np.ndarray, length: np.ndarray,
                score: Callable[[np.ndarray, TokenLogits], tuple[np.ndarray, Tensor]]) -> Tensor:
    """Return the scores of J noised captions, [J] on the device, in as many decoder calls as the budget needs.

    Args:
        image, length: those of `decoder_calls`.
        score: takes the indices of a call's rows, long [R], and its `TokenLogits`. Returns the captions that these rows
            serve, or -1, long [S], and their scores, [S].
    """
    found = [score(*part) for part in decoder_calls(call, image, length)]
    order, scores = np.concatenate([served for served, _ in found]), torch.cat([own for _, own in found])
    # `order` says which caption a score is of. Its inverse, behind the scores of none, says where a caption's score is.
    where = order.argsort()[(order < 0).sum():]
    return scores.index_select(0, call.to_device(where))


def first_of_equal(ids: np.ndarray) -> np.ndarray:
    """Return the first row that is equal to each row of ids, long [J] from long [J, L]."""
    # Equal rows have equal sums. Rows that only have equal sums are told apart by their ids.
    sums = ids @ np.random.default_rng(0).integers(2 ** 62, size=ids.shape[1])
    _, first, group = np.unique(sums, return_index=True, return_inverse=True)
    first = first[group]
    return np.where((ids == ids[first]).all(1), first, np.arange(len(ids)))


def distinct_logits(call: Call, text: Tensor, lengths: np.ndarray, predicted: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 logits [D, V] of one decoder call without equal rows, and which of them each place has, long [M].

    Args:
        text: ids of the call's rows, long [R, L] on the CPU.
        lengths: number of tokens of each row, long [R].
        predicted: places, long [M] into R*L.
    """
    image, position = call.image, np.arange(text.shape[1])
    # [R, 1 + L], without what stands in the padding.
    ids = np.where(position < lengths[:, None], text.numpy(), -1)
    first = first_of_equal(np.column_stack((image, ids)))
    rows = np.unique(first)
    (index, token_logits), = decoder_calls(call._replace(max_tokens=text.numel()), image[rows], lengths[rows])
    # The row of the call that reads each distinct row. Index -1 only fills up the call.
    called = np.empty(len(text), dtype=int)
    called[rows[index[index >= 0]]] = (index >= 0).nonzero()[0]
    row, position = np.divmod(predicted.numpy(), text.shape[1])
    place, which = np.unique(called[first[row]] * lengths.max() + position, return_inverse=True)
    logits = token_logits(text[rows[index], :lengths.max()], torch.from_numpy(place))
    return logits, torch.from_numpy(which)
