"""Options of decoding, and how a token is chosen: the most probable one, or a draw with temperature, top_k and top_p.

Values that do not go together are refused when the options are made.

Dimensions: R captions (rows), L positions, M predicted tokens, V vocabulary.
"""
import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from ..objectives.config import CaptionCfg
from .options import REPEATS, SAMPLER_NAMES, check

LENGTHS_OF_HEAD = ("auto", "sample", "likely")  # values of `length` for which the length head chooses
COLDEST = 1e-6  # smallest temperature. Any logits can be divided by it


class Sampling(NamedTuple):
    """Settings to choose tokens by. The defaults are greedy, and a temperature draws."""

    temperature: float = 0.0  # 0 is greedy. Otherwise logits are divided by it, before top_k and top_p
    top_k: int | None = None  # keep the k most probable tokens
    top_p: float | None = None  # then keep the fewest that together have probability p or more (nucleus sampling)
    generator: torch.Generator | None = None  # on the logits' device. None is the global one

    def check(self) -> None:
        """Raise ValueError if a value is out of range, or if greedy decoding would ignore it."""
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: it must be 0 (greedy), or finite and 1e-6 or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}: it must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: it must be more than 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature: without one the most probable token is taken")


GREEDY = Sampling()


def check_samples(samples: int, sampling: Sampling, drawn: bool) -> None:
    sampling.check()
    if samples < 1 or samples > 1 and not drawn:
        raise ValueError(f"samples is {samples}: it must be 1, or more with a temperature (without one all are equal)")


@dataclass(frozen=True)
class Unmasking:
    """Set how masked diffusion unmasks captions. Raises ValueError for values that do not go together.

    Attributes:
        length: the paper's N', the number of tokens to generate between SOT and EOT, which are given. "auto" takes each
            image's best length (`best_of_lengths`), "sample" draws from p(N | image), and "likely" gives an image's
            `samples` its most probable lengths in turn (those at least a tenth as probable as the first). None is
            `default_length`.
        tokens_per_step: of sampler "confidence", see `reveal`.
        repeats: of sampler "confidence". "avoid" forbids the words of revealed neighbours (`without_neighbours`).
        sampler: "confidence" (Eq. 6, `unmask_by_confidence`) or "ancestral", which is random (`denoise`).
        steps: number of steps for "ancestral". None is 100, as in training.
        guidance_scale: see `guided`. 1 is the model itself, without a second pass.
        guidance_weak: the unconditional branch. "blind" is the null image, "masked" the image with features masked as
            in training, drawn once (MC-Diffusion). None is the one that the model was trained with.
        samples: number of captions per image. They differ only if they are drawn.
        sampling: how tokens are chosen. Its generator is used for all random numbers.
    """

    length: int | str | None = None
    tokens_per_step: int | float = 1
    repeats: str = "allow"
    sampler: str = "confidence"
    steps: int | None = None
    guidance_scale: float = 1.0
    guidance_weak: str | None = None
    samples: int = 1
    sampling: Sampling = GREEDY

    def __post_init__(self):
        for name, values in (("sampler", SAMPLER_NAMES), ("repeats", REPEATS)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {' or '.join(map(repr, values))}")
        # The commands ask the same function, with the names of their flags.
        check({field.name: value for field in fields(self) if field.name != "guidance_weak"
               and (value := getattr(self, field.name)) != field.default}, str)
        check_samples(self.samples, self.sampling, self.drawn)

    @property
    def drawn(self) -> bool:
        """Return True if the captions of an image can differ."""
        return bool(self.sampling.temperature) or self.length in ("sample", "likely") or self.sampler == "ancestral"

    def uncond(self, cfg: CaptionCfg) -> str:
        """Return guidance's unconditional branch. Raises ValueError if the model cannot compute it."""
        uncond = self.guidance_weak or cfg.default_uncond
        if uncond not in ("blind", "masked"):
            raise ValueError(f"guidance_weak is {uncond!r}: it must be 'blind' or 'masked'")
        if uncond == "masked" and not cfg.condition_drop:
            raise ValueError("guidance_weak='masked' needs a model that was trained with masked image features "
                             "(caption_cfg.condition_drop); 'blind' does not")
        return uncond

    def check_length(self, longest: int, has_head: bool) -> None:
        """Raise ValueError if a model cannot give captions of this length."""
        if self.length in LENGTHS_OF_HEAD:
            if not has_head:
                raise ValueError(f"length={self.length!r} needs a model with a length head (caption_cfg.length_head)")
        elif not (isinstance(self.length, int) and 1 <= self.length <= longest):
            raise ValueError(f"length is {self.length!r}: it must be 'auto', 'sample' or a number of tokens from 1 to "
                             f"{longest}")


@dataclass(frozen=True)
class Search:
    """Set how a causal model searches for captions, or samples them. Raises ValueError for values that do not fit.

    Attributes:
        length: most tokens before EOT, which the model predicts itself. "auto" or None is what fits the context.
        num_beams: see `beam_search`. Not used with a temperature.
        min_length: fewest tokens before EOT. Without it, likelihood favours short captions.
        samples: number of captions per image. More than one needs a temperature.
        sampling: with a temperature, tokens are drawn and there is no search.
    """

    length: int | str | None = None
    num_beams: int = 6
    min_length: int = 0
    samples: int = 1
    sampling: Sampling = GREEDY

    def __post_init__(self):
        check_samples(self.samples, self.sampling, bool(self.sampling.temperature))

    def max_length(self, longest: int) -> int:
        """Return the most tokens of a caption. Raises ValueError if they are more than `longest`, which fit."""
        max_length = longest if self.length in (None, "auto") else self.length
        if not isinstance(max_length, int) or not 1 <= max_length <= longest:
            raise ValueError(f"length is {self.length!r}: it must be 'auto' or a number of tokens from 1 to {longest}")
        return max_length


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits divided by the temperature and cut by top_k and top_p, float64 [M, V], -inf where cut.

    Temperature 0 keeps the most probable token alone.
    """
    logits = logits.double()
    if sampling.temperature == 0:
        return torch.full_like(logits, -torch.inf).scatter(1, logits.argmax(1, keepdim=True), 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.shape[1]:
        kept, index = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(1, index, kept)
    if sampling.top_p is not None:
        probability, index = logits.softmax(1).sort(dim=1, descending=True)
        before = probability.cumsum(1) - probability
        logits = logits.masked_fill(
            torch.zeros_like(logits, dtype=torch.bool).scatter(1, index, before >= sampling.top_p), -torch.inf)
    return logits


def sample_tokens(logits: Tensor, sampling: Sampling) -> Tensor:
    """Choose one token per row of logits [M, V], greedily or by the Gumbel-max trick: long [M].

    The noise is float64, as float32 noise draws rare tokens too rarely. If greedy tokens are equal, the lowest id wins.
    """
    sampling.check()
    if sampling.temperature == 0:
        return logits.argmax(1)
    logits = truncate(logits, sampling)
    return (logits - torch.empty_like(logits).exponential_(generator=sampling.generator).log()).argmax(1)


class Decoded(NamedTuple):
    """Decoded captions, with the step and the log-probability of each token.

    The sum of `log_prob` is the log-likelihood of the decoded tokens given the others. For a causal model this is the
    caption's log-likelihood (Eq. 7). A masked diffusion model was given EOT, so the sum is not the caption's heuristic
    score, which predicts EOT, too. Use `log_likelihood` for that.
    """

    text: Tensor  # long [R, L], SOT to EOT, then padding. No mask ids
    step: Tensor  # long [R, L], the step that decoded the token, from 0, or -1 where it was given
    log_prob: Tensor  # float32 [R, L], of the token at that step, at temperature 1, or 0 where it was given
