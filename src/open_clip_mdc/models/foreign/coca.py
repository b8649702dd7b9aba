"""OpenCLIP's CoCa (Yu et al. 2022, arXiv 2205.01917), the reference row of Table 3, scored and decoded by our code.

Its own `generate` needs beam search classes that transformers 5 has dropped. Its groups of diverse beams are not
reproduced.
"""
from open_clip.coca_model import CoCa
from torch import Tensor

from .base import ForeignCaptioner


class CoCaCaptioner(ForeignCaptioner):
    """CoCa's caption decoder. Raises ValueError for a text tower of transformers, whose ids are others."""

    def __init__(self, model: CoCa):
        if not hasattr(model.text, "vocab_size"):
            raise ValueError("this CoCa has a text tower of transformers: it can only be compared by --scorer cosine")
        super().__init__(model, model.text.vocab_size, model.text.context_length, model.text_decoder.width)

    def encode(self, image: Tensor) -> Tensor:
        return self.model._encode_image(image)[1]

    def logits(self, tokens: Tensor, text: Tensor) -> Tensor:
        return self.model.text_decoder(tokens, self.model._encode_text(text)[1])
