"""Captions without their padding: the real tokens of a batch one after another, and which of them are predicted.

Training packs on the CPU, before the batch goes to the device, so that nothing on the training path waits for it.

Dimensions: R captions (rows) of B images, P patches, L positions, N valid tokens of all rows, M asked tokens, W width.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .special_tokens import valid_tokens

LENGTH_MULTIPLE = 16  # of L in training: attention kernels need no copy of their mask


class NoisedCaptions(NamedTuple):
    """Captions with noise, still padded: what the decoder reads and what it predicts."""

    text: Tensor  # long [R, L], mask_id where a token is hidden
    loss_mask: Tensor  # bool [R, L], the tokens that the loss is a sum over
    weight: Tensor  # float [R, L], their weight in it, 0 elsewhere
    target: Tensor  # bool [R, L], the tokens whose number the loss is divided by
    causal: bool | Tensor  # whether a caption is read from left to right; bool [R] where captions of a batch differ
    t: Tensor  # float [R], how much is hidden


class Packed(NamedTuple):
    """Input of the decoder. Its linear layers run on the N tokens, attention on [R, L]."""

    token: Tensor  # long [N], mask_id where a token is hidden
    position: Tensor  # long [N], in its caption
    place: Tensor | None  # long [N] into R*L; None when nothing is packed, so that the decoder pads by views
    valid: Tensor  # bool [R, L], True first and False after
    padded: bool  # whether `valid` is False anywhere, as far as is known without asking the device
    causal: bool | Tensor  # whether a caption is read left to right; bool [R] where captions differ


class Predicted(NamedTuple):
    """The tokens that a loss is about."""

    index: Tensor  # long [M], the packed token that predicts it
    row: Tensor  # long [M], the caption that it belongs to
    token: Tensor  # long [M], what it is
    read: Tensor  # long [M], what the decoder reads in its place
    t: Tensor  # float [M], how much of its caption is hidden
    weight: Tensor  # float [M], in the loss


class Captions(NamedTuple):
    """A batch of captions, noised and packed. OpenCLIP's loop moves it like a tensor."""

    packed: Packed
    predicted: Predicted
    num_target: Tensor  # float [R], what the loss is divided by, summed over the batch
    t: Tensor  # float [R], for networks that read the time
    masked: Tensor | None = None  # bool [B, P], image features that the decoder does not get to see
    text: Tensor | None = None  # long [B, L], without noise, for a text tower

    def to(self, device: torch.device | str | None = None, non_blocking: bool = False) -> "Captions":
        return each_tensor(self, lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Captions":
        return each_tensor(self, Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        each_tensor(self, lambda x: x.record_stream(stream))

    def sum_rows(self, x: Tensor) -> Tensor:
        """Return the sum over each caption's predicted tokens: [R] from [M]."""
        return x.new_zeros(len(self.num_target)).index_add(0, self.predicted.row, x)


def each_tensor(x, function: Callable[[Tensor], Tensor]):
    if isinstance(x, tuple):
        return type(x)(*(each_tensor(field, function) for field in x))
    return function(x) if isinstance(x, Tensor) else x


def pack_tokens(text: Tensor, valid: Tensor, causal: bool | Tensor, length_multiple: int | None = None) -> Packed:
    """Pack the valid tokens, and cut L to the longest caption. Asks the text's device for sizes, so give it on the CPU.

    Args:
        text, valid: [R, L]. `valid` is True first and False after, at least once per row.
        length_multiple: L is rounded up to it, and nothing is a view. None leaves L and copies no more than needed.
    """
    length = int(valid.sum(1).max())
    if length_multiple is not None:
        length = -(-length // length_multiple) * length_multiple
    valid = F.pad(valid, (0, max(0, length - valid.shape[1])))[:, :length]
    row, position = valid.nonzero().unbind(1)
    padded = length_multiple is not None or len(row) < valid.numel()
    return Packed(text[row, position], position, row * length + position if padded else None, valid, padded, causal)


def predictor_index(predicted: Tensor, valid: Tensor, causal: bool | Tensor) -> Tensor:
    """Return which packed token predicts each True one of `predicted` [R, L] (causal: the one before): long [M]."""
    row, position = predicted.nonzero().unbind(1)
    lengths = valid.sum(1)
    back = causal[row].long() if isinstance(causal, Tensor) else int(causal)
    return (lengths.cumsum(0) - lengths)[row] + position - back


def partition_indices(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return where a mask [...] is True and where not: long [count] and the rest, into the flattened mask."""
    # `nonzero` would wait for the device to count.
    places = mask.flatten().int().argsort(descending=True, stable=True)
    return places[:count], places[count:]


def scatter_flat(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Return x [R, L] with values [M] at places, long [M] into R*L."""
    return x.flatten().scatter(0, places, values).view_as(x)


def pack(text: Tensor, corrupted: NoisedCaptions, vocab_size: int) -> Captions:
    """Pack a training batch: ids [B, L] as the tokenizer makes them, and R/B consecutive rows of noise for each."""
    text = text.repeat_interleave(len(corrupted.text) // len(text), 0)
    valid = valid_tokens(text, vocab_size)
    row, position = corrupted.loss_mask.nonzero().unbind(1)
    return Captions(
        pack_tokens(corrupted.text, valid, corrupted.causal, LENGTH_MULTIPLE),
        Predicted(predictor_index(corrupted.loss_mask, valid, corrupted.causal), row, text[row, position],
              corrupted.text[row, position], corrupted.t[row], corrupted.weight[row, position]),
        corrupted.target.sum(1).float(),
        corrupted.t,
    )
