"""Options of masked diffusion decoding and of search. Values that do not go together are refused by the constructor."""
from dataclasses import dataclass, fields

from ..objectives.config import CaptionCfg
from .options import REPEATS, SAMPLER_NAMES, check
from .sampling import GREEDY, Sampling

LENGTHS_OF_HEAD = ("auto", "sample", "likely")  # values of `length` for which the length head chooses


@dataclass(frozen=True)
class Unmasking:
    """How masked diffusion unmasks captions. Raises ValueError for values that do not go together.

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
    """How a causal model searches for captions, or samples them. Raises ValueError for values that do not fit.

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


def check_samples(samples: int, sampling: Sampling, drawn: bool) -> None:
    sampling.check()
    if samples < 1 or samples > 1 and not drawn:
        raise ValueError(f"samples is {samples}: it must be 1, or more with a temperature (without one all are equal)")
