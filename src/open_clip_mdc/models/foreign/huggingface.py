"""Captioners of transformers that encode an image first, and give the tokens to a decoder from left to right.

Another `model_type` is a row of KINDS.
"""
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .base import EncodedBefore, ForeignCaptioner, ForeignTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Kind(NamedTuple):
    """A `model_type` of transformers: its image encoder, and the settings that hold the ids of SOT and EOT."""

    encoder: str
    sot: str
    eot: str


KINDS = {
    "vision-encoder-decoder": Kind("encoder", "decoder_start_token_id", "eos_token_id"),
    "blip": Kind("vision_model", "bos_token_id", "sep_token_id"),
    "git": Kind("git.image_encoder", "bos_token_id", "eos_token_id"),
}


def setting(model: "PreTrainedModel", name: str) -> int:
    """Return an id from the settings of the decoder, of `generate`, or of the model. Raises ValueError if none has."""
    places = (model.config.get_text_config(decoder=True), model.generation_config, model.config)
    found = next((value for place in places if (value := getattr(place, name, None)) is not None), None)
    if not isinstance(found, int):
        raise ValueError(f"its config.json and generation_config.json give no {name}")
    return found


class HFCaptioner(ForeignCaptioner):
    """A captioner of `KINDS`, a model of transformers with `labels`."""

    def __init__(self, model: "PreTrainedModel"):
        from transformers.modeling_outputs import BaseModelOutput
        kind, text = KINDS[model.config.model_type], model.config.get_text_config(decoder=True)
        super().__init__(model, text.vocab_size, text.max_position_embeddings, text.hidden_size,
                         (setting(model, kind.sot), setting(model, kind.eot)))
        # [R, 1, P, D], as GIT wants images of four dimensions.
        self.images = EncodedBefore(model.get_submodule(kind.encoder),
                                    lambda tokens: BaseModelOutput(last_hidden_state=tokens[:, 0]))
        self.images.config = self.images.encoder.config
        model.set_submodule(kind.encoder, self.images)

    def tokens_by(self, tokenizer: "PreTrainedTokenizerBase") -> ForeignTokens:
        return ForeignTokens(partial(tokenizer.encode, add_special_tokens=False, verbose=False),
                             partial(tokenizer.decode, skip_special_tokens=True), self.vocab_size, self.context_length)

    def encode(self, image: Tensor) -> Tensor:
        return self.images.encoder(pixel_values=image)[0]

    def logits(self, tokens: Tensor, text: Tensor) -> Tensor:
        given = {"decoder_input_ids": text} if self.model.config.is_encoder_decoder else {
            "input_ids": text, "logits_to_keep": text.shape[1]}
        return self.model(pixel_values=tokens[:, None], use_cache=False, **given).logits
