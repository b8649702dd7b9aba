"""Options of decoding, which are checked once, when they are made. Imports no torch.

`Unmasking` has those of masked diffusion, `Search` those of a causal model, and both hold a `Sampling`. Python's
`generate` and both commands make the same objects. Their flags are in integration/decoding_flags.py.
"""
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from ..errors import OptionError, check_scale, plural
from .rules import LENGTHS, SAMPLERS

if TYPE_CHECKING:
    import torch

    from ..objectives.registry import Objective

REPEATS = ("allow", "avoid")
UNCOND = ("null_image", "masked_image")
SELECT = ("consensus",)
BEAM = "beam"  # the sampler that searches from left to right
MASKS = re.compile(r"(?:[\[<［＜]|&lt;)\s*mask\s*(?:[\]>］＞]|&gt;)", re.IGNORECASE)  # how people write [MASK]
NULL_IMAGES = 256  # images whose mean is the null image
MIN_NULL_IMAGES = 32  # the mean of fewer still shows what is in them
COLDEST = 1e-6  # smallest temperature. Any logits can be divided by it
# Files keep the names that options and their values had when the first of them was written.
IN_FILES = {"uncond": "guidance_weak", "null_image": "blind", "masked_image": "masked", "top": "likely"}


class TooFewImages(ValueError):
    """Too few images for a null image."""


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise OptionError unless `value` is one of the choices."""
    if value not in choices:
        raise OptionError(f"{{{name}}} is {value!r}: it must be {' or '.join(map(repr, choices))}")


class Sampling(NamedTuple):
    """Settings to choose tokens by. The defaults are greedy, and a temperature draws."""

    temperature: float = 0.0  # 0 is greedy. Otherwise logits are divided by it, before top_k and top_p
    top_k: int | None = None  # keep the k most probable tokens
    top_p: float | None = None  # then keep the fewest that together have probability p or more (nucleus sampling)
    generator: "torch.Generator | None" = None  # on the logits' device. None is the global one

    def check(self) -> None:
        """Raise OptionError if a value is out of range, or if greedy decoding would ignore it."""
        if self.temperature != 0 and not COLDEST <= self.temperature < math.inf:
            raise OptionError(f"{{temperature}} is {self.temperature}: it must be 0 (greedy), or finite and 1e-6 or "
                              "more")
        if self.top_k is not None and self.top_k < 1:
            raise OptionError(f"{{top_k}} is {self.top_k}: it must be 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise OptionError(f"{{top_p}} is {self.top_p}: it must be more than 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise OptionError("{top_k} and {top_p} need a {temperature}: without one the most probable token is taken")


GREEDY = Sampling()


def check_samples(options: "Unmasking | Search") -> None:
    """Raise OptionError if captions of an image would all be equal, or there are too few to select from."""
    options.sampling.check()
    samples, select = options.samples, options.select
    if samples < 1 or samples > 1 and not options.draws:
        raise OptionError(f"{{samples}} is {samples}: it must be 1, or more with a {{temperature}} (without one all "
                          "are equal)")
    check_choice("select", select, (None, *SELECT))
    if select and samples < 2:
        raise OptionError("{select} needs {samples} 2 or more")


@dataclass(frozen=True)
class Unmasking:
    """Set how masked diffusion unmasks captions. Raises OptionError for values that do not go together."""

    length: int | str | None = None  # N', tokens between SOT and EOT, or a key of LENGTHS. None is `default_length`
    tokens_per_step: int | float = 1  # see `confidence.reveal`
    repeats: str = "allow"  # "avoid" forbids the words of revealed neighbours (`without_neighbours`)
    sampler: str = "confidence"  # a key of SAMPLERS
    steps: int | None = None  # of "ancestral". None is 100, as in training
    guidance_scale: float = 1.0  # see `confidence.guided`. 1 is the model itself, without a second pass
    # The branch of guidance that sees no image: the mean image or zeros, or the image with features masked as in
    # training, drawn once (MC-Diffusion). None is the one that the model was trained with.
    uncond: str | None = None
    samples: int = 1  # captions per image, which differ only if they are drawn or have different lengths
    select: str | None = None  # "consensus" keeps the sample that is most similar to all of its image (`agreement`)
    sampling: Sampling = GREEDY  # how tokens are chosen. Its generator is used for all random numbers

    def __post_init__(self):
        check_choice("sampler", self.sampler, SAMPLERS)
        check_choice("repeats", self.repeats, REPEATS)
        check_choice("uncond", self.uncond, (None, *UNCOND))
        check_scale("guidance_scale", self.guidance_scale)
        k = self.tokens_per_step
        if not (0 <= k <= 1 if isinstance(k, float) else 1 <= k < 2**31):
            raise OptionError(f"{{tokens_per_step}} is {k}: it must be 1 token or more, or a probability such as 0.9")
        if self.uncond is not None and self.guidance_scale == 1:
            raise OptionError("{uncond} changes nothing without a {guidance_scale} other than 1")
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                check_rule(field.name, self.sampler)
        check_samples(self)

    @property
    def draws(self) -> bool:
        """Return True if the captions of an image can differ."""
        by_length = self.length in LENGTHS and LENGTHS[self.length].draws
        return bool(self.sampling.temperature) or by_length or SAMPLERS[self.sampler].draws

    def check_length(self, longest: int, has_head: bool) -> None:
        """Raise OptionError if a model cannot give captions of this length."""
        if self.length in LENGTHS:
            if not has_head:
                raise OptionError(f"{{length}} {self.length} needs a model with caption_cfg.length_head")
        elif not (isinstance(self.length, int) and 1 <= self.length <= longest):
            raise OptionError(f"{{length}} is {self.length!r}: it must be {', '.join(map(repr, LENGTHS))} or a number "
                              f"of tokens from 1 to {longest}")


@dataclass(frozen=True)
class Search:
    """Set how a causal model searches for captions, or samples them. Raises OptionError for values that do not fit."""

    length: int | str | None = None  # most tokens before EOT. "auto" or None is what fits the context
    num_beams: int = 6  # see `beam_search`. Not used with a temperature
    min_length: int = 0  # fewest tokens before EOT. Without it, likelihood favours short captions
    sampler: str = BEAM  # the only one
    samples: int = 1  # see `Unmasking`, also for `select`
    select: str | None = None
    sampling: Sampling = GREEDY  # with a temperature, tokens are drawn and there is no search

    def __post_init__(self):
        check_choice("sampler", self.sampler, (BEAM,))
        check_samples(self)
        if isinstance(self.length, int) and self.min_length > self.length:
            raise OptionError(f"{{min_length}} {self.min_length} is more than {{length}} {self.length}")

    @property
    def draws(self) -> bool:
        """Return True if the captions of an image can differ."""
        return bool(self.sampling.temperature)

    def max_length(self, longest: int) -> int:
        """Return the most tokens of a caption. Raises OptionError if they are more than `longest`, which fit."""
        max_length = longest if self.length in (None, "auto") else self.length
        if not isinstance(max_length, int) or not 1 <= max_length <= longest:
            raise OptionError(f"{{length}} is {self.length!r}: it must be 'auto' or a number of tokens from 1 to "
                              f"{longest}")
        return max_length


UNMASKING, SEARCH = frozenset(Unmasking.__dataclass_fields__), frozenset(Search.__dataclass_fields__)
OF_UNMASKING = UNMASKING - SEARCH | {"text", "clip_scale"}
OF_SEARCH = SEARCH - UNMASKING
CHOOSE_UNMASKING = OF_UNMASKING | {"sampler", "length", "samples"}  # in a model that learnt to search, too


def check_rule(name: str, sampler: str) -> None:
    """Raise OptionError for an option that another sampler reads, and this one does not."""
    owners = [other for other, rule in SAMPLERS.items() if name in rule.options]
    if owners and sampler not in owners:
        raise OptionError(f"{{{name}}} needs {{sampler}} {' or '.join(owners)}, not {sampler}")


def searches(given: Mapping, objective: "Objective | None") -> bool:
    """Return True if captions are searched from left to right, and False if they are unmasked.

    A model that learnt both (Mix) is searched unless you give a length, samples or an option of unmasking, and one of
    blocks by the sampler "beam". None stands for a model of OpenCLIP. Raises OptionError for one of the other kind.
    """
    causal, sampler = objective is None or objective.order == "causal", given.get("sampler")
    both = not causal and "autoregressive" in objective.scorers
    if sampler == BEAM and not (causal or both or objective.order == "blocks"):
        raise OptionError("{sampler} beam needs a model that learnt to read from left to right (ARC-, Mix-, -b4)")
    causal = causal or sampler == BEAM or both and given.keys().isdisjoint(CHOOSE_UNMASKING)
    if causal and sampler not in (None, BEAM):
        raise OptionError(f"{{sampler}} {sampler} is not supported by this model, which is autoregressive")
    for name in given:
        if name in (OF_UNMASKING if causal else OF_SEARCH):
            kind = "searches with a beam" if sampler == BEAM else "is autoregressive" if causal else \
                "decodes by unmasking captions of a given length"
            raise OptionError(f"{{{name}}} is not supported by this model, which {kind}")
    return causal


def checked(given: Mapping, causal: bool, sampling: Sampling = GREEDY) -> Unmasking | Search:
    """Return the options of a kind of model, made of those in `given` that are theirs."""
    kind, names = (Search, SEARCH) if causal else (Unmasking, UNMASKING)
    return kind(**{name: value for name, value in given.items() if name in names} | {"sampling": sampling})


def check_text(text: str, length: int | str | None) -> None:
    """Raise OptionError if a caption has nothing to fill in, or is given with a length."""
    if length is not None:
        raise OptionError("{text} says how many tokens there are; leave out {length}")
    if not MASKS.search(text):
        raise OptionError(f"{{text}} {text!r} has no [MASK] to fill in")


def check_clip(given: Mapping) -> None:
    """Raise OptionError for options of a CLIP model that do not go together."""
    scale, rerank = given.get("clip_scale", 0.0), given.get("clip_rerank", 1)
    check_scale("clip_scale", scale)
    if (scale != 0 or rerank > 1) != ("clip" in given):
        raise OptionError("{clip} MODEL:FILE needs {clip_scale} or {clip_rerank}, and these need {clip}")
    if rerank > 1 and given.get("select"):
        raise OptionError("{select} and {clip_rerank} each keep one of several captions: leave out one of them")
    if scale:
        check_rule("clip_scale", given.get("sampler", "confidence"))


def readable(options: Mapping, causal: bool) -> dict:
    """Return options of `generate` for captions that people read: repeats are avoided, unless asked otherwise."""
    if not causal and "repeats" in SAMPLERS[options.get("sampler", "confidence")].options:
        return {"repeats": "avoid", **options}
    return dict(options)


def in_files(options: Mapping) -> dict:
    """Return options by the names that journals and results have had from the first (IN_FILES)."""
    return {IN_FILES.get(name, name): IN_FILES.get(value, value) if isinstance(value, str) else value
            for name, value in options.items()}


def guides(options: Mapping) -> bool:
    """Return True if guidance is on. A scale of 1 is the model itself."""
    return options.get("guidance_scale", 1) != 1


def needs_null_image(options: Mapping, model) -> bool:
    """Return True if guidance needs a mean image, as the captioner was not trained with zeros for the null image."""
    return guides(options) and (options.get("uncond") or model.caption_cfg.default_uncond) == "null_image" \
        and not model.caption_cfg.condition_zeros


def spread(items: Sequence) -> Sequence:
    """Return NULL_IMAGES items or more, if there are so many, from all over a list, as folders are often sorted."""
    return items[::max(1, len(items) // NULL_IMAGES)]


def check_null_images(count: int, flag: str) -> None:
    """Raise TooFewImages if `count` images are too few for a null image. `flag` is the flag that names more."""
    if count < MIN_NULL_IMAGES:
        raise TooFewImages(f"the mean of {plural(count, 'image')} still shows them, so it is no null image: give "
                           f"{MIN_NULL_IMAGES} or more by {flag}")
