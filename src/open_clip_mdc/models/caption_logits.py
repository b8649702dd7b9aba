"""Logits of predicted tokens only, which decoding (Eq. 6) and scoring (Eq. 8) ask for. Padding costs no compute.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, M predicted tokens, V vocabulary.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..text.packing import LENGTH_MULTIPLE, each_tensor, in_few_sizes, pack_tokens
from .decoder import TextDecoder
from .interface import ImageKV
from .step_graphs import StepGraphs


class CaptionLogits:
    """A `TokenLogits` for captions of known lengths. They are packed once for any number of decoder calls."""

    def __init__(self, decoder: TextDecoder, image_kv: ImageKV, lengths: Sequence[int], causal: bool,
                 infer_time: Callable | None, graphs: StepGraphs | None = None):
        """Pack the positions of R captions of these lengths.

        Args:
            infer_time: finds the step, long [R], when a call does not give it. None if the decoder reads no step.
            graphs: run the decoder. Captions of several lengths are then padded to sizes that recur.
        """
        self.decoder, self.image_kv, self.infer_time = decoder, image_kv, infer_time
        self.forward = decoder if graphs is None else graphs.of(decoder)
        device = image_kv[0][0].device
        lengths = torch.as_tensor(lengths)
        valid = torch.arange(int(lengths.max())) < lengths[:, None]
        place = torch.arange(valid.numel()).view_as(valid)  # into the text, packed like its tokens
        packed = pack_tokens(place, valid, causal) if graphs is None or valid.all() else in_few_sizes(
            pack_tokens(place, valid, causal, LENGTH_MULTIPLE))
        self.packed = each_tensor(packed, lambda x: x.to(device, non_blocking=True))
        # For each position of [R, L], the packed token whose hidden state predicts it.
        self.predictor = (valid.flatten().cumsum(0) - 1 - int(causal)).to(device, non_blocking=True)

    def __call__(self, text: Tensor, predicted: Tensor, time: Tensor | None = None) -> Tensor:
        """Return logits [M, V] at `predicted`, long [M] into R*L, of `text`, long [R, L] with mask ids."""
        if time is None and self.infer_time is not None:
            time = self.infer_time(text, self.packed.valid.sum(1))
        token = text.flatten()
        if self.packed.place is not None:
            token = token.index_select(0, self.packed.token)
        hidden = self.forward(self.packed._replace(token=token), self.image_kv, time)
        return self.decoder.output(hidden.index_select(0, self.predictor.index_select(0, predicted)))
