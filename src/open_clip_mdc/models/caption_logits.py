"""Logits of a captioner for given texts, which decoding (Eq. 6) and scoring (Eq. 8) ask for.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, M predicted tokens, V vocabulary,
W decoder width.
"""
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..objectives.blocks import two_streams
from ..text.packing import LENGTH_MULTIPLE, NoisedCaptions, Packed, Sight, each_tensor, pack_tokens, pad_to_bucket
from ..text.special_tokens import PAD_ID, mask_id, valid_tokens
from .decoder import TextDecoder, TextKV
from .interface import ImageKV, Network, TokenLogits

if TYPE_CHECKING:
    from .step_graphs import StepGraphs


class CaptionLogits:
    """A `TokenLogits` for captions of known lengths. They are packed once for any number of decoder calls."""

    def __init__(self, decoder: TextDecoder, image_kv: ImageKV, lengths: Sequence[int], causal: bool,
                 infer_time: Callable, graphs: "StepGraphs | None", position: Tensor | None,
                 sight: Sight | Tensor | None):
        """Pack the positions of R captions of these lengths.

        Args:
            infer_time: finds the step when a call does not give it (`CaptionReader.infer_time`).
            graphs: run the decoder. Captions of several lengths are then padded to sizes that recur.
            position, sight: as in `pack_tokens`, without graphs.
        """
        self.decoder, self.image_kv, self.infer_time = decoder, image_kv, infer_time
        # `of` sees whether the weights have changed since the graphs were made.
        self.forward = decoder if graphs is None else graphs.of(decoder)
        device = image_kv[0][0].device
        lengths = torch.as_tensor(lengths)
        valid = torch.arange(int(lengths.max())) < lengths[:, None]  # [R, L]
        place = torch.arange(valid.numel()).view_as(valid)  # [R, L] into the text, packed like its tokens
        # A CUDA graph serves one size. Captions of many lengths are rounded up to few sizes.
        multiple = None if graphs is None or valid.all() else LENGTH_MULTIPLE
        packed = pack_tokens(place, valid, causal, multiple, position, sight)
        packed = packed if multiple is None else pad_to_bucket(packed)
        self.packed = each_tensor(packed, lambda x: x.to(device, non_blocking=True))
        # For each position of [R, L], the packed token whose hidden state predicts it.
        self.predictor = (valid.flatten().cumsum(0) - 1 - int(causal)).to(device, non_blocking=True)

    def __call__(self, text: Tensor, predicted: Tensor, time: Tensor | None = None) -> Tensor:
        """Return logits [M, V] at `predicted`, long [M] into R*L, of `text`, long [R, L] with mask ids."""
        if time is None:
            time = self.infer_time(text, self.packed.valid)
        # The places of valid tokens never change, only the ids in them.
        token = text.flatten()
        if self.packed.place is not None:
            token = token.index_select(0, self.packed.token)  # [N]
        # The large product [M, W] x [W, V] is made for predicted tokens alone.
        hidden = self.forward(self.packed._replace(token=token), self.image_kv, time)  # [N, W]
        return self.decoder.output(hidden.index_select(0, self.predictor.index_select(0, predicted)))


class BlockLogits(CaptionLogits):
    """A `TokenLogits` for all blocks of captions at once, each beside the clean blocks before it."""

    def __init__(self, decoder: TextDecoder, image_kv: ImageKV, text: Tensor, size: int, infer_time: Callable):
        """Pack both streams of captions [R, L] on the CPU, in blocks of `size` tokens."""
        ids, position, valid, sight = two_streams(  # [R, W] each, W tokens of both streams
            text, torch.full((len(text),), size), decoder.vocab_size, decoder.context_length)
        super().__init__(decoder, image_kv, valid.sum(1), False, infer_time, None, position, sight)
        # The noisy stream comes first in a row, and the text has it alone: [R, W] -> [R, L].
        self.predictor = F.pad(self.predictor.view(ids.shape), (0, text.shape[1] - ids.shape[1])).flatten()
        # What the clean stream reads never changes.
        self.clean, self.position, self.noisy = (
            x.to(self.predictor.device, non_blocking=True) for x in (ids, position, sight.noisy))

    def __call__(self, text: Tensor, predicted: Tensor, time: Tensor | None = None) -> Tensor:
        """Return logits [M, V] at `predicted`, long [M] into R*L, of the noisy stream `text`, long [R, L]."""
        return super().__call__(text.gather(1, self.position).where(self.noisy, self.clean), predicted, time)


class BlockReader:
    """A `Network` that reads one block after another. Its texts [R, 1 + n] begin with the token before the block."""

    def __init__(self, decoder: TextDecoder, image_kv: ImageKV):
        self.decoder, self.image_kv = decoder, image_kv
        self.past: TextKV | None = None

    def __call__(self, lengths: Sequence[int]) -> TokenLogits:
        return self.logits

    def logits(self, text: Tensor, predicted: Tensor) -> Tensor:
        """Return logits [M, V] at `predicted`, long [M] into R*(1 + n), of `text`, long [R, 1 + n]."""
        hidden, _ = self.decoder.step(text[:, 1:], self.image_kv, self.past)  # [R, n, W]
        row, column = predicted // text.shape[1], predicted % text.shape[1]
        return self.decoder.output(hidden[row, column - 1])

    def keep(self, block: Tensor) -> Tensor:
        """Read a finished block, long [R, n], which all later ones see. Returns its hidden states, [R, n, W]."""
        hidden, self.past = self.decoder.step(block, self.image_kv, self.past)
        return hidden

    def select(self, row: Tensor) -> None:
        """Let each row go on from another one of the same image, long [R]."""
        if self.past is not None:
            self.past = [(k[row], v[row]) for k, v in self.past]


class Footprint(NamedTuple):
    """Sizes of a decoder, from which `log_likelihood` tells the memory of a call."""

    vocab_size: int
    width: int
    layers: int  # of keys and values that are kept of an image
    element_size: int  # bytes of a weight
    copies_image: bool = False  # True if each caption's row holds the image's tokens once more
    joins: bool = False  # True if a row may hold captions that begin alike (prefixes.py)


class CaptionReader(nn.Module):
    """Name what decoding and scoring ask of a model with `text`, an `objective` and patch tokens of images."""

    @property
    def causal(self) -> bool:
        """Return True if captions are scored and decoded from left to right."""
        return self.objective.order == "causal"

    def check_length(self, tokens: int) -> None:
        """Raise ValueError if a text is longer than the context. (On CUDA a bad index would end the process.)"""
        if tokens > self.context_length:
            raise ValueError(f"a text of {tokens} tokens, SOT and EOT included, is longer than this model's context "
                             f"of {self.context_length}")

    def check_whole(self) -> None:
        """Raise ValueError if this model does not read whole captions, but one block after another."""
        if self.objective.order == "blocks":
            raise ValueError("this model reads a caption block by block, and this needs a model that reads it whole")

    def check_attention(self) -> None:
        """Raise ValueError if this model has no attention of a whole caption to the image."""
        self.check_whole()
        if not isinstance(self.text, TextDecoder):
            raise ValueError("this model's decoder is an LSTM, which attends to no place of the image: give a run of "
                             "a model without -lstm")

    def corrupt_nelbo(self, text: Tensor, u: Tensor, generator: torch.Generator | None = None) -> NoisedCaptions:
        """Add noise of t in (0, 1] to `text` [B, L], whatever the trained interval. The mean loss is the NELBO."""
        if self.objective.corrupt_full_interval is not None:
            return self.objective.corrupt_full_interval(text, self.vocab_size, u, generator)
        cfg = replace(self.caption_cfg, t_min=0.0, t_max=1.0, loss_weight="inverse_t",
                      block_sizes=self.caption_cfg.block_sizes[:1])  # the size that decodes
        return self.objective.corrupt(text, self.vocab_size, cfg, u, generator)

    def token_logits(self, image_kv: ImageKV, lengths: Sequence[int], graphs: "StepGraphs | None" = None,
                     clean: Tensor | None = None, causal: bool | None = None, position: Tensor | None = None,
                     sight: Tensor | None = None) -> CaptionLogits:
        """Return a function from texts to logits of predicted tokens only. Padding costs no compute.

        Args:
            image_kv: `self.text.project_image(...)` of B images. R/B consecutive rows belong to each.
            lengths: number of tokens in each of the R rows, at least one.
            graphs: run the decoder, without gradients.
            clean: the true captions, long [R, L] on the CPU, for a model that reads earlier blocks beside noisy ones.
            causal: whether to read from left to right, for a model that learnt both. By default `self.causal`.
            position, sight: of tokens that are not a caption, on the CPU, long [R, L] and bool [R, L, L] (`packing`).

        Raises ValueError if a length exceeds the context, or if such a model gets no `clean`.
        """
        self.check_length(max(lengths) if position is None else int(position.max()) + 1)
        if clean is not None:
            return BlockLogits(self.text, image_kv, clean, self.caption_cfg.block_sizes[0], self.infer_time)
        self.check_whole()
        return CaptionLogits(self.text, image_kv, lengths, self.causal if causal is None else causal, self.infer_time,
                             graphs, position, sight)

    def network(self, image_embs: Tensor) -> Network:
        """Return the function from texts to logits of images with these patch tokens, [B, P, D]."""
        return partial(self.token_logits, self.text.project_image(image_embs))

    @property
    def footprint(self) -> Footprint:
        """Return the sizes by which `log_likelihood` splits its work."""
        weight = self.text.output.weight
        return Footprint(*weight.shape, len(self.text.blocks), weight.element_size(),
                         joins=isinstance(self.text, TextDecoder))

    def infer_time(self, text: Tensor, valid: Tensor) -> Tensor | None:
        """Return each row's step, long [R], judged by its share of masks. None if the decoder reads no step.

        Args: `text` is long [R, L], `valid` [R, L] is False at padding.
        """
        if self.text.time_embedding is None:
            return None
        from ..objectives.replace_process import infer_time  # only diffusion in steps needs it
        share = (text == mask_id(self.vocab_size)).sum(1).double() / (valid.sum(1) - 1).clamp(min=1)  # [R], without SOT
        return infer_time(share, self.objective.schedule(self.vocab_size, text.device))

    def logits(self, image: Tensor, text: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return logits at every position of a text, [B, L, V]. It is simple and slow, for tests and notebooks.

        Position i predicts token i in a bidirectional model, and token i + 1 in a causal one.

        Args:
            text: long [B, L], mask ids included.
            valid: bool [B, L], False at padding. By default True up to the first EOT. Give it if EOT is masked.

        Raises ValueError if the text is longer than the context, if `valid` is needed to know where it ends, or for a
        model of blocks.
        """
        self.check_length(text.shape[1])
        self.check_whole()
        if valid is None:
            valid = valid_tokens(text, self.vocab_size)
            endless = (valid.all(-1) & (text[:, -1] == PAD_ID)).nonzero()
            if len(endless):
                raise ValueError(f"text {int(endless[0])} has no EOT and ends in padding: give `valid` [B, L] too")
        # No packing: every position is a token, and `valid` hides padding from attention.
        position = torch.arange(text.shape[1], device=text.device).repeat(len(text))  # [B*L]
        image_kv = self.text.project_image(self.encode_image_tokens(image))
        hidden = self.text(Packed(text.flatten(), position, None, valid, True, self.causal), image_kv,
                           self.infer_time(text, valid))  # [B*L, W]
        return self.text.output(hidden).view(*text.shape, -1)
