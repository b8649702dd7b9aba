"""Logits of predicted tokens only, which decoding (Eq. 6) and scoring (Eq. 8) ask for. Padding costs no compute.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, M predicted tokens, V vocabulary.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..text.packing import each_tensor, pack_tokens
from .decoder import TextDecoder
from .interface import ImageKV


class CaptionLogits:
    """A `TokenLogits` for captions of known lengths. They are packed once for any number of decoder calls."""

    def __init__(self, decoder: TextDecoder, image_kv: ImageKV, lengths: Sequence[int], causal: bool,
                 infer_time: Callable | None):
        """Pack the positions of R captions of these lengths.

        Args: `infer_time` finds the step, long [R], when a call does not give it. None if the decoder reads no step.
        """
        self.decoder, self.image_kv, self.infer_time = decoder, image_kv, infer_time
        device = image_kv[0][0].device
        lengths = torch.as_tensor(lengths)
        valid = torch.arange(int(lengths.max())) < lengths[:, None]
        self.packed = each_tensor(pack_tokens(valid.long(), valid, causal), lambda x: x.to(device, non_blocking=True))
        # For each position of [R, L], the packed token whose hidden state predicts it.
        self.predictor = (valid.flatten().cumsum(0) - 1 - int(causal)).to(device, non_blocking=True)

    def __call__(self, text: Tensor, predicted: Tensor, time: Tensor | None = None) -> Tensor:
        """Return logits [M, V] at `predicted`, long [M] into R*L, of `text`, long [R, L] with mask ids."""
        if time is None and self.infer_time is not None:
            time = self.infer_time(text, self.packed.valid.sum(1))
        place, token = self.packed.place, text.flatten()
        packed = self.packed._replace(token=token if place is None else token.index_select(0, place))
        hidden = self.decoder(packed, self.image_kv, time)
        return self.decoder.output(hidden.index_select(0, self.predictor.index_select(0, predicted)))
