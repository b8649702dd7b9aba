"""`ForeignCaptioner`: a captioner of another project, for the scores that Table 2 gives to ARC (Eq. 7).

SOT and EOT lie anywhere in other vocabularies, and in GPT-2's they are one id. There texts have two ids beyond the
vocabulary for them, as text/special_tokens.py wants it. The model sees its own.

Dimensions: B images, R captions (R/B consecutive rows per image), L positions, P image tokens, D width, V vocabulary.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...objectives.registry import OBJECTIVES
from ...text.special_tokens import PAD_ID, eot_id, sot_id
from ..caption_logits import Footprint
from ..interface import Network, StepLogits
from ..precision import without_autocast


class ForeignCaptioner(nn.Module):
    """A captioner that reads from left to right, with what scoring and beam search ask of a model.

    A subclass says what the decoder reads of an image (`encode`) and the logits of a text (`logits`).
    """

    objective = OBJECTIVES["arc"]

    def __init__(self, model: nn.Module, vocab_size: int, context_length: int, width: int,
                 ends: tuple[int, int] | None = None):
        """Keep the model and the sizes of its decoder. `ends` are its SOT and EOT, unless they are the last ids."""
        super().__init__()
        self.model, self.context_length, self.width, self.ends = model, context_length, width, ends
        self.vocab_size = vocab_size + 2 * (ends is not None)

    def encode(self, image: Tensor) -> Tensor:
        """Return what the decoder reads of images [B, 3, height, width]: [B, P, D]."""
        raise NotImplementedError

    def logits(self, tokens: Tensor, text: Tensor) -> Tensor:
        """Return logits [R, L, V] from [R, P, D] and the model's ids, long [R, L]. Position i predicts token i + 1."""
        raise NotImplementedError

    def tokens_by(self, tokenizer: Any) -> Any:
        """Return the tokenizer of the texts that this model is given here, from its own."""
        return tokenizer if self.ends is None else ForeignTokens(
            tokenizer.encode, tokenizer.decode, self.vocab_size, self.context_length)

    def next_logits(self, tokens: Tensor, text: Tensor) -> Tensor:
        """Return `logits` for ids with SOT and EOT as everywhere here, long [R, L]."""
        if self.ends is None:
            return self.logits(tokens, text)
        start, end = self.ends
        text = text.where(text != sot_id(self.vocab_size), start).where(text != eot_id(self.vocab_size), end)
        logits = self.logits(tokens, text)  # [R, L, V - 2]
        # The logit of the model's own EOT moves to the last place. SOT is never predicted.
        moved = F.pad(logits, (0, 2), value=-torch.inf)
        moved[..., -1] = logits[..., end]
        moved[..., end] = -torch.inf
        return moved

    def encode_image_tokens(self, image: Tensor) -> Tensor:
        """Return `encode`'s tokens, [B, P, D]. If `image` are tokens already, they are returned."""
        return image if image.ndim == 3 else self.encode(image)

    @property
    def footprint(self) -> Footprint:
        """Return the sizes by which `log_likelihood` splits its work."""
        return Footprint(self.vocab_size, self.width, 1, next(self.parameters()).element_size(), copies_image=True)

    def network(self, tokens: Tensor) -> Network:
        """Return the function from texts to logits of images with these tokens, [B, P, D]."""
        def token_logits(text: Tensor, predicted: Tensor) -> Tensor:
            # Near captions differ by less than what bfloat16 rounds off a logit.
            with without_autocast(text.device.type):
                logits = self.next_logits(tokens.float().repeat_interleave(len(text) // len(tokens), 0), text)
            # [R, L, V] -> [M, V]
            return logits.flatten(0, 1).index_select(0, predicted - 1).float()

        return lambda lengths, **reading: token_logits

    def step_logits(self, image: Tensor) -> StepLogits:
        """Return the function that gives the next token's logits [R, V]. Images [B, 3, h, w] are encoded once."""
        tokens = self.encode_image_tokens(image)

        def logits(text: Tensor, parent: Tensor) -> Tensor:
            return self.next_logits(tokens.repeat_interleave(len(text) // len(tokens), 0), text)[:, -1]

        return logits


@dataclass(frozen=True)
class ForeignTokens:
    """A tokenizer under the names of OpenCLIP's SimpleTokenizer, from functions between texts and ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocab_size: int
    context_length: int

    def __call__(self, texts: str | Sequence[str], context_length: int | None = None) -> Tensor:
        """Return ids from SOT to EOT, then padding, long [B, L]. L is that of the longest, at most the context."""
        most = (context_length or self.context_length) - 2
        rows = [torch.tensor([sot_id(self.vocab_size), *self.encode(text)[:most], eot_id(self.vocab_size)])
                for text in ([texts] if isinstance(texts, str) else texts)]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
