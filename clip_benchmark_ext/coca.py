"""Decode OpenCLIP's CoCa, the reference row of Table 3, by our beam search.

CoCa's own `generate` needs beam search classes that transformers 5 has dropped. Its groups of diverse beams are not
reproduced.

Dimensions: B images, R rows (R/B consecutive ones per image), n tokens so far, V vocabulary.
"""
from inspect import signature

import torch
from open_clip.coca_model import CoCa
from torch import Tensor

from open_clip_mdc.decoding.beam import beam_search
from open_clip_mdc.decoding.generate import cut
from open_clip_mdc.decoding.sampling import Decoded
from open_clip_mdc.models.interface import StepLogits


def step_logits(model: CoCa, image: Tensor) -> StepLogits:
    """Return the function that gives the next token's logits [R, V]. Images [B, 3, height, width] are encoded once."""
    latent, embedded = model._encode_image(image)
    # OpenCLIP 3.3 drops the last logit by default, 4.x never does.
    whole = {"output_labels": False} if "output_labels" in signature(CoCa.forward).parameters else {}

    def logits(text: Tensor, parent: Tensor) -> Tensor:
        rows = len(text) // len(image)
        return model(None, text, latent.repeat_interleave(rows, 0), embedded.repeat_interleave(rows, 0),
                     **whole)["logits"][:, -1]

    return logits


class CoCaCaptioner:
    def __init__(self, model: CoCa):
        self.model = model
        self.vocab_size = model.text.vocab_size

    @torch.no_grad()
    def generate(self, image: Tensor, length: int | str = "auto", num_beams: int = 6, min_length: int = 0,
                 return_trace: bool = False) -> Tensor | Decoded:
        """Decode captions like decoding/generate.py.

        `length` is the maximum number of tokens between SOT and EOT, or "auto" for all of the context.
        """
        longest = self.model.text.context_length - 2
        self.model.eval()
        decoded = beam_search(step_logits(self.model, image), len(image), self.vocab_size,
                              longest if length == "auto" else min(length, longest), num_beams, image.device,
                              min_length)
        return cut(decoded, self.vocab_size, return_trace)
