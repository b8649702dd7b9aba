"""Packed captions: the real tokens of a batch, one after another without padding, and which of them are predicted.

Training packs on the CPU, before the batch moves to the device, so that no training step waits for the device.

Dimensions: B images, R captions (R/B consecutive rows per image), P patches, L positions, N valid tokens of all rows,
M predicted tokens.
"""
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from .special_tokens import mask_id, valid_tokens

LENGTH_MULTIPLE = 16  # L is a multiple of it in training and in CUDA graphs. Attention need not copy the mask then.


class Sight(NamedTuple):
    """Which tokens of a row see each other, if it is neither all of them nor those to the left (`sees`)."""

    block: Tensor  # long [R, L], the block of each token
    noisy: Tensor  # bool [R, L], True in the noisy stream, False in the clean one


class NoisedCaptions(NamedTuple):
    """Noised captions x_t, still padded, and which tokens to predict.

    The first six fields are enough if a row is the caption itself, with some tokens masked. A row of any other tokens,
    in another order or in two streams, also says what is asked for. L is then the length of that row.
    """

    text: Tensor  # long [R, L], mask_id where a token is masked
    loss_mask: Tensor  # bool [R, L], True at tokens to predict: the loss sums over these
    weight: Tensor  # float [R, L], their weight in the loss, 0 elsewhere
    target: Tensor  # bool [R, L], True at target tokens: the loss is divided by their number
    causal: bool | Tensor  # True if captions are read from left to right, or bool [R] if they differ
    t: Tensor  # float [R], the noise level
    # What the token at each place is asked for, long [R, L]. By default it is the clean caption at the same place, and
    # where `causal` the token before a place is asked for it.
    tokens: Tensor | None = None
    position: Tensor | None = None  # long [R, L], positions in the caption. By default the place in the row
    valid: Tensor | None = None  # bool [R, L], True first and then False. By default the clean caption's tokens
    sight: Sight | Tensor | None = None  # or a relation of your own, bool [R, L, L], True where a query sees a key


class Packed(NamedTuple):
    """Input of the decoder. Its linear layers run on N tokens, its attention on [R, L]."""

    token: Tensor  # long [N], mask_id where a token is masked
    position: Tensor  # long [N], the token's position in its caption
    place: Tensor | None  # long [N] into R*L. None if there is no padding, so that the decoder can use views
    valid: Tensor  # bool [R, L], False at padding, which comes last in a row
    padded: bool  # False if `valid` is known to be True everywhere without asking the device
    causal: bool | Tensor  # True if captions are read from left to right, or bool [R] if they differ
    sight: Sight | Tensor | None = None  # as in NoisedCaptions. It goes before `causal`


class Predicted(NamedTuple):
    """The tokens that the loss predicts."""

    index: Tensor  # long [M], the packed token whose hidden state predicts it
    row: Tensor  # long [M], its caption
    token: Tensor  # long [M], the true id x_0
    read: Tensor  # long [M], the id x_t that the decoder reads at its position
    t: Tensor  # float [M], the noise level of its caption
    weight: Tensor  # float [M], its weight in the loss


class Captions(NamedTuple):
    """A batch of captions, noised and packed. OpenCLIP's loop moves it like a tensor."""

    packed: Packed
    predicted: Predicted
    num_target: Tensor  # float [R], number of target tokens. The loss is divided by their sum
    t: Tensor  # float [R], the noise level, for decoders that read the step
    masked: Tensor | None = None  # bool [B, P], True at masked image features
    text: Tensor | None = None  # long [B, L], the clean captions for a text tower

    def to(self, device: Device = None, non_blocking: bool = False) -> "Captions":
        return each_tensor(self, lambda x: x.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Captions":
        return each_tensor(self, Tensor.pin_memory)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        each_tensor(self, lambda x: x.record_stream(stream))

    def sum_rows(self, x: Tensor) -> Tensor:
        """Return the sum over each caption's predicted tokens: [R] from [M]."""
        # index_add, as captions have different numbers of predicted tokens.
        return x.new_zeros(len(self.num_target)).index_add(0, self.predicted.row, x)


def each_tensor(x, function: Callable[[Tensor], Tensor]):
    if isinstance(x, tuple):
        return type(x)(*(each_tensor(field, function) for field in x))
    return function(x) if isinstance(x, Tensor) else x


def sees(sight: Sight | Tensor) -> Tensor:
    """Return which query sees which key, bool [R, L, L]: its own block in its own stream, and earlier clean blocks.

    One rule holds all orders. One noisy block is MDC, clean blocks of one token are ARC. A noisy stream beside a clean
    one at the same positions is block diffusion (Arriola et al. 2025, BD3-LM) and XLNet (Yang et al. 2019).
    """
    if isinstance(sight, Tensor):
        return sight
    # [R, L, 1] for queries against [R, 1, L] for keys.
    block, noisy = (x[:, :, None] for x in sight)
    key_block, key_noisy = (x[:, None] for x in sight)
    return (noisy == key_noisy) & (block == key_block) | ~key_noisy & (key_block < block)


def resized(x: Tensor, length: int) -> Tensor:
    """Return x [R, n] or [R, n, n], cut or filled with zeros to [R, length] or [R, length, length]."""
    x = F.pad(x, (0, max(0, length - x.shape[1])) * (x.ndim - 1))
    return x[:, :length] if x.ndim == 2 else x[:, :length, :length]


def pack_tokens(text: Tensor, valid: Tensor, causal: bool | Tensor, length_multiple: int | None = None,
                position: Tensor | None = None, sight: Sight | Tensor | None = None) -> Packed:
    """Pack the valid tokens, and cut L to the longest caption. Give tensors on the CPU, as their sizes are read.

    Args:
        text, valid: [R, L]. `valid` is True first and then False, at least once True per row.
        length_multiple: L is rounded up to a multiple of it. None does not round, and needs no copies without padding.
        position, sight: as in `NoisedCaptions`.
    """
    # On the CPU this reads memory. On a GPU it would wait.
    length = int(valid.sum(1).max())
    if length_multiple is not None:
        length = -(-length // length_multiple) * length_multiple
    # [R, L], L now the longest caption, or a multiple above it.
    valid = resized(valid, length)
    # [N] each, row after row.
    row, column = valid.nonzero().unbind(1)
    padded = length_multiple is not None or len(row) < valid.numel()
    return Packed(text[row, column], column if position is None else position[row, column],
                  row * length + column if padded else None, valid, padded, causal,
                  each_tensor(sight, lambda x: resized(x, length)))


def pad_to_bucket(packed: Packed) -> Packed:
    """Repeat the last token, at its own place, until N is a size that recurs: at most 8 lie between two powers of 2."""
    count = len(packed.token)
    multiple = max(LENGTH_MULTIPLE, 2 ** (count.bit_length() - 4))
    # A token that is written twice at its own place changes nothing.
    index = torch.arange(-(-count // multiple) * multiple).clamp(max=count - 1)
    return Packed(*(x[index] for x in packed[:3]), *packed[3:])


def predictor_index(predicted: Tensor, valid: Tensor, causal: bool | Tensor) -> Tensor:
    """Return the packed token that predicts each True position of `predicted` [R, L], long [M].

    It is the token itself, or the one before it where `causal`.
    """
    row, position = predicted.nonzero().unbind(1)
    lengths = valid.sum(1)
    back = causal[row].long() if isinstance(causal, Tensor) else int(causal)
    # The first packed token of a row, then the place in the row. A causal model reads the token before.
    return (lengths.cumsum(0) - lengths)[row] + position - back


def partition_indices(mask: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the flat indices where a mask is True, long [count], and those of the rest."""
    # `nonzero` would wait for the device to count them.
    places = mask.flatten().int().argsort(descending=True, stable=True)
    return places[:count], places[count:]


def scatter_flat(x: Tensor, places: Tensor, values: Tensor | float) -> Tensor:
    """Return x [R, L] with `values`, [M] or one number, written at `places`, long [M] into R*L."""
    return x.flatten().scatter(0, places, values).view_as(x)


def of_token(x: Tensor, token: Tensor) -> Tensor:
    """Return what x [M, V] holds for each row's own token, [M]."""
    return x.gather(1, token[:, None]).squeeze(1)


def check_rows(text: Tensor, noised: NoisedCaptions, valid: Tensor, vocab_size: int, objective: str) -> None:
    """Raise ValueError if rows are no rows that can be packed, or if nobody says what is asked for.

    Without `tokens`, a row must be the clean caption [R, L] with some tokens masked. Reversed text would otherwise be
    asked for the words of the caption as it was.
    """
    given = [x for x in noised if isinstance(x, Tensor) and x.ndim == 2]
    if any(x.shape != noised.text.shape for x in given):
        raise ValueError(f"objective {objective!r} gives tensors of several shapes: "
                         f"{', '.join(str(list(x.shape)) for x in given)}")
    if noised.tokens is None:
        alike = noised.text.shape == text.shape and (
            (noised.text == text) | (noised.text == mask_id(vocab_size)) | ~valid).all()
        if not alike:
            raise ValueError(f"objective {objective!r} reads other tokens than the caption's: give what is asked for "
                             "at each place as NoisedCaptions.tokens")
    if not valid[:, 0].all() or (valid[:, 1:] & ~valid[:, :-1]).any() or (noised.loss_mask & ~valid).any():
        raise ValueError(f"objective {objective!r} gives rows that are not valid first and padding then, or asks for "
                         "padding")
    if isinstance(noised.sight, Tensor) and not (noised.sight.any(2) | ~valid).all():
        raise ValueError(f"objective {objective!r} has a token that sees nothing: let it see itself")


def pack(text: Tensor, noised: NoisedCaptions, vocab_size: int, objective: str = "") -> Captions:
    """Pack a training batch of clean ids [B, L] and its noised captions, R/B consecutive rows for each.

    Raises ValueError, with the name of the objective, for rows that do not say what is asked for (`check_rows`).
    """
    # An objective may make several noised rows of a caption.
    text = text.repeat_interleave(len(noised.text) // len(text), 0)
    valid = valid_tokens(text, vocab_size) if noised.valid is None else noised.valid
    check_rows(text, noised, valid, vocab_size, objective)
    # A token answers for itself if the objective says for what, else a causal model's token for the one after it.
    asked, causal = (text, noised.causal) if noised.tokens is None else (noised.tokens, False)
    row, place = noised.loss_mask.nonzero().unbind(1)
    return Captions(
        pack_tokens(noised.text, valid, noised.causal, LENGTH_MULTIPLE, noised.position, noised.sight),
        Predicted(predictor_index(noised.loss_mask, valid, causal), row, asked[row, place],
                  noised.text[row, place], noised.t[row], noised.weight[row, place]),
        noised.target.sum(1).float(),
        noised.t,
    )
