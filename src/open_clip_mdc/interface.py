"""What the code that decodes and scores captions knows of a network, so that none of it imports the model.

The algorithms (unmask.py, beam.py, estimators.py, monte_carlo.py) take a function from tokens to logits and can be run
on a table written by hand; the drivers (generate.py, scoring.py) take a `CaptionModel`.

Dimensions: B or I images, R captions (rows), L positions, M asked tokens, n tokens so far, P patches, D width, H heads,
V vocabulary.
"""
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

ImageKV = list[tuple[Tensor, Tensor]]  # per layer: keys and values of the image, [I, H, P, D/H] each

# (text [R, L], asked, long [M] into R*L, step, long [R]) -> float32 logits [M, V] of the tokens at the asked places.
# The step, of diffusion in steps, is left out by an algorithm that knows none; the network then finds it or needs none.
TokenLogits = Callable[..., Tensor]

# The numbers of tokens of R captions, the longest of which is L -> their `TokenLogits`; as `Captioner.token_logits`
# with the keys and values of I images, of which each has R/I consecutive rows. The lengths are on the CPU, and so is
# the number M of asked tokens, so that no step of an algorithm waits for the device.
Network = Callable[[Sequence[int]], TokenLogits]

# (text [R, n], parent [R]) -> [R, V]; row r continues row parent[r] of the call before, so that a cache can follow.
StepLogits = Callable[[Tensor, Tensor], Tensor]


class Decoded(NamedTuple):
    """Decoded captions and how they came about.

    The sum of `log_prob` is the likelihood of what was decoded given what was not. For a causal model that is the
    caption's (Eq. 7). A masked diffusion model was given where the caption ends, so that it is not the caption's
    heuristic score, for which EOT is one of the tokens to predict: ask `scoring.log_likelihood`.
    """

    text: Tensor  # long [R, L], SOT to EOT, then padding; no mask ids
    step: Tensor  # long [R, L], the step that decoded the token, from 0; -1 where it was given
    log_prob: Tensor  # float32 [R, L], of the token at that step, temperature 1; 0 where it was given


class Guide(Protocol):
    """`clip_guidance.Guide`: another model's opinion of captions of the B images of one batch."""

    scale: float  # of guidance, 0 for none
    top_k: int  # candidates of a token that are compared

    def __call__(self, text: Tensor, image: Tensor) -> Tensor:
        """What is added to log p of the candidates, [M, K], of complete captions [M, K, L] of images [M]."""

    def similarity(self, text: Tensor) -> Tensor:
        """How well captions [R, L] fit their images, [R]; R/B consecutive ones belong to each."""


class CaptionModel(Protocol):
    """`model.Captioner`, as far as it is used here."""

    vocab_size: int
    context_length: int
    training: bool
    causal: bool  # whether captions are read left to right
    objective: Any  # objective.Objective: scorers, schedule
    caption_cfg: Any  # objective.CaptionCfg: condition_drop, condition_mask, condition_zeros, weak
    text: Any  # decoder.TextDecoder: project_image, step, output
    length_head: Any  # length_head.LengthHead or None

    def encode_image_tokens(self, image: Tensor, masked: Tensor | None = None,
                            tokens: Tensor | None = None) -> Tensor:
        """[B, P, D] from [B, 3, height, width], with tokens masked where `masked` [B, P] says so."""

    def token_logits(self, image_kv: ImageKV, lengths: Sequence[int]) -> TokenLogits:
        """A `Network` once the image is built in."""

    def train(self, mode: bool = True) -> Any:
        """Sets `training`."""
