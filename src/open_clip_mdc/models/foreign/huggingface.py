"""Captioners of transformers that encode an image first, and give the tokens to a decoder from left to right.

Another `model_type` is a row of KINDS.
"""
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .base import ForeignCaptioner, ForeignTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


KINDS = {  # by `model_type`: the image encoder, and the settings that hold the ids of SOT and EOT
    "vision-encoder-decoder": ("encoder", "decoder_start_token_id", "eos_token_id"),
    "blip": ("vision_model", "bos_token_id", "sep_token_id"),
    "git": ("git.image_encoder", "bos_token_id", "eos_token_id"),
}


def setting(model: "PreTrainedModel", name: str) -> int:
    """Return an id from the settings of the decoder, of `generate`, or of the model. Raises ValueError if none has."""
    places = (model.config.get_text_config(decoder=True), model.generation_config, model.config)
    found = next((value for place in places if (value := getattr(place, name, None)) is not None), None)
    if not isinstance(found, int):
        raise ValueError(f"its config.json and generation_config.json give no {name}")
    return found


class EncodedBefore(nn.Module):
    """Stands where a model has its image encoder, and passes on the tokens that it is given, [R, 1, P, D]."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.config = encoder, encoder.config

    def forward(self, pixel_values: Tensor, **_):
        from transformers.modeling_outputs import BaseModelOutput
        return BaseModelOutput(last_hidden_state=pixel_values[:, 0])


class HFCaptioner(ForeignCaptioner):
    """A captioner of `KINDS`, a model of transformers with `labels`."""

    def __init__(self, model: "PreTrainedModel"):
        (encoder, *ends), text = KINDS[model.config.model_type], model.config.get_text_config(decoder=True)
        super().__init__(model, text.vocab_size, text.max_position_embeddings, text.hidden_size,
                         tuple(setting(model, name) for name in ends))
        self.images = EncodedBefore(model.get_submodule(encoder))
        model.set_submodule(encoder, self.images)

    def tokens_by(self, tokenizer: "PreTrainedTokenizerBase") -> ForeignTokens:
        return ForeignTokens(partial(tokenizer.encode, add_special_tokens=False, verbose=False),
                             partial(tokenizer.decode, skip_special_tokens=True), self.vocab_size, self.context_length)

    def encode(self, image: Tensor) -> Tensor:
        return self.images.encoder(pixel_values=image)[0]

    def logits(self, tokens: Tensor, text: Tensor) -> Tensor:
        given = {"decoder_input_ids": text} if self.model.config.is_encoder_decoder else {
            "input_ids": text, "logits_to_keep": text.shape[1]}
        # GIT wants images of four dimensions.
        return self.model(pixel_values=tokens[:, None], use_cache=False, **given).logits
