"""Decoding options and checks for `open_clip_mdc caption` and `clip_benchmark eval`. Imports no torch.

OPTIONS has the options of `generate.generate` and of CLIP guidance. Both commands make their flags from it.
"""
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping

from ..errors import number_from, plural

OF_UNMASKING = ("text", "tokens_per_step", "repeats", "sampler", "steps", "guidance_scale", "guidance_weak",
                "clip_scale", "clip_top_k")
OF_SEARCH = ("min_length", "num_beams")
OF_CLIP = ("clip", "clip_scale", "clip_top_k", "clip_rerank")
REPEATS = ("allow", "avoid")
SAMPLER_NAMES = ("confidence", "ancestral")
MASKS = re.compile(r"(?:[\[<［＜]|&lt;)\s*mask\s*(?:[\]>］＞]|&gt;)", re.IGNORECASE)  # how people write [MASK]
NULL_IMAGES = 256  # images, the first ones, whose mean is the null image
MIN_NULL_IMAGES = 32  # the mean of fewer still shows what is in them
LARGEST_SCALE = 1e6  # its product with any log-probability is finite in float32
DEFAULTS = {"temperature": 0.0, "sampler": "confidence", "guidance_scale": 1.0, "clip_scale": 0.0, "clip_top_k": 5,
            "clip_rerank": 1, "samples": 1}
positive = number_from(1)


class TooFewImages(ValueError):
    """Too few images for a null image."""


def caption_length(value: str) -> int | str:
    """Parse a number of tokens, "auto", "sample" or "likely"."""
    if value in ("auto", "sample", "likely"):
        return value
    try:
        return positive(value)
    except ArgumentTypeError as problem:
        raise ArgumentTypeError(f"{problem}: it is neither a number of tokens nor auto, sample or likely") from problem


def tokens_per_step(value: str) -> int | float:
    """Parse a number of tokens such as 2, or a probability such as 0.9."""
    number = float(value) if "." in value else int(value)
    if not (0 <= number <= 1 if isinstance(number, float) else number >= 1):
        raise ArgumentTypeError(f"{value} should be a number of tokens, 1 or more, or a probability such as 0.9")
    return number


# Arguments of argparse's add_argument by option. Result files list options in this order.
OPTIONS = {
    "length": dict(type=caption_length, metavar="N|auto|sample|likely",
                   help="caption length in tokens (for autoregressive models the maximum), or auto for the most likely "
                        "length, sample to draw one, likely to give --samples the likely ones in turn (default: 15, "
                        "but auto in open_clip_mdc if the model predicts lengths)"),
    "min_length": dict(type=number_from(0), metavar="N", help="minimum caption length in tokens (default: 0)"),
    "tokens_per_step": dict(type=tokens_per_step, metavar="K|P",
                            help="reveal K tokens per step or, given a probability P such as 0.9, all tokens at least "
                                 "that probable (default: 1)"),
    "repeats": dict(choices=REPEATS,
                    help="whether a word may stand twice in a row: avoid takes a revealed neighbour's word only where "
                         "it is at least 95%% probable (default: allow, by Eq. 6, but avoid in open_clip_mdc)"),
    "sampler": dict(choices=SAMPLER_NAMES,
                    help="reveal the most confident tokens first, or draw from the reverse diffusion (default: "
                         "confidence)"),
    "steps": dict(type=positive, metavar="N", help="number of steps of the ancestral sampler (default: 100)"),
    "num_beams": dict(type=positive, metavar="N", help="number of beams of the beam search (default: 6)"),
    "temperature": dict(type=float, metavar="T", help="sampling temperature (default: 0, greedy)"),
    "top_k": dict(type=positive, metavar="K", help="sample from the K most probable tokens (default: all)"),
    "top_p": dict(type=float, metavar="P",
                  help="sample from the fewest tokens whose probabilities add up to P (default: 1, all)"),
    "samples": dict(type=positive, metavar="N",
                    help="number of captions to sample per image, which needs a temperature: --select keeps one, or "
                         "clip_benchmark measures their diversity (default: 1)"),
    "select": dict(choices=("consensus",),
                   help="keep the one of --samples that is most similar to all of them (minimum Bayes risk)"),
    "guidance_scale": dict(type=float, metavar="S",
                           help="scale of classifier-free guidance, above 1 to follow the image more closely, and 0 to "
                                "ignore it (default: 1, no guidance)"),
    "guidance_weak": dict(choices=("blind", "masked"),
                          help="unconditional branch of guidance: blind is the null image, masked the image with some "
                               "features masked (default: the one that the model was trained with, else blind)"),
    "clip": dict(metavar="MODEL:FILE",
                 help="OpenCLIP model that guides or reranks captions, by name and weights, or local-dir:DIR"),
    "clip_scale": dict(type=float, metavar="S",
                       help="at each step, multiply the probabilities of the best tokens by CLIP's to the power of S "
                            "(default: 0, no CLIP guidance)"),
    "clip_top_k": dict(type=positive, metavar="K",
                       help="number of tokens that CLIP compares at each step (default: 5)"),
    "clip_rerank": dict(type=positive, metavar="N",
                        help="sample N captions, which needs a temperature, and keep the one that CLIP finds closest "
                             "to the image (default: 1)"),
}


def add_flags(parser, names: Iterable[str], spell: Callable[[str], str]) -> None:
    """Add flags to an argparse parser or group. `spell` turns a name of OPTIONS into the flag."""
    for name in names:
        kind = "masked diffusion: " * (name in OF_UNMASKING) + "autoregressive: " * (name in OF_SEARCH)
        parser.add_argument(spell(name), **OPTIONS[name] | {"help": kind + OPTIONS[name]["help"]})


def readable(options: Mapping, causal: bool) -> dict:
    """Return options of `generate` for captions that people read: repeats are avoided, unless asked otherwise."""
    return dict(options) if causal or options.get("sampler") == "ancestral" else {"repeats": "avoid", **options}


def guides(options: Mapping) -> bool:
    """Return True if guidance is on. A scale of 1 is the model itself."""
    return options.get("guidance_scale", 1) != 1


def needs_null_image(options: Mapping, model) -> bool:
    """Return True if guidance needs a mean image, as the captioner was not trained with zeros for the null image."""
    return guides(options) and (options.get("guidance_weak") or model.caption_cfg.default_uncond) == "blind" \
        and not model.caption_cfg.condition_zeros


def check_null_images(count: int, flag: str) -> None:
    """Raise TooFewImages if `count` images are too few for a null image. `flag` is the flag that names more."""
    if count < MIN_NULL_IMAGES:
        raise TooFewImages(f"the mean of {plural(count, 'image')} still shows them, so it is no null image: give "
                           f"{MIN_NULL_IMAGES} or more by {flag}")


def check_kind(given: Mapping, causal: bool, flag: Callable[[str], str]) -> None:
    """Raise ValueError if an option is for the other kind of model. `flag` turns an option's name into the flag."""
    for name in OF_UNMASKING if causal else OF_SEARCH:
        if name in given:
            kind = "is autoregressive" if causal else "decodes by unmasking captions of a given length"
            raise ValueError(f"{flag(name)} is not supported by this model, which {kind}")


def check_scale(name: str, value: float) -> None:
    """Raise ValueError if a guidance scale (classifier-free or CLIP's) would make logits infinite or NaN."""
    if not abs(value) <= LARGEST_SCALE:  # also refuses NaN
        raise ValueError(f"{name} is {value}: it must be a number from -1e6 to 1e6")


def check(given: Mapping, flag: Callable[[str], str]) -> None:
    """Raise ValueError for options that do not go together, whatever the model is."""
    ancestral = given.get("sampler") == "ancestral"
    uses_clip = given.get("clip_scale") or given.get("clip_rerank", 1) > 1
    tokens_per_step, sampler, steps, weak, scale, clip, clip_scale, rerank = map(flag, (
        "tokens_per_step", "sampler", "steps", "guidance_weak", "guidance_scale", "clip", "clip_scale", "clip_rerank"))
    if given.get("text") is not None and given.get("length") is not None:
        raise ValueError(f"{flag('text')} says how many tokens there are; leave out {flag('length')}")
    if given.get("text") is not None and not MASKS.search(given["text"]):
        raise ValueError(f"{flag('text')} {given['text']!r} has no [MASK] to fill in")
    for name in ("guidance_scale", "clip_scale"):
        check_scale(flag(name), given.get(name, DEFAULTS[name]))
    if ancestral and "tokens_per_step" in given:
        raise ValueError(f"{tokens_per_step} needs {sampler} confidence; for ancestral give {steps}")
    if not ancestral and "steps" in given:
        raise ValueError(f"{steps} needs {sampler} ancestral; for confidence give {tokens_per_step}")
    if ancestral and given.get("repeats") == "avoid":
        raise ValueError(f"{flag('repeats')} avoid needs {sampler} confidence")
    if "guidance_weak" in given and not guides(given):
        raise ValueError(f"{weak} changes nothing without a {scale} other than 1")
    if "clip" in given and not uses_clip:
        raise ValueError(f"{clip} changes nothing without {clip_scale} or {rerank}")
    if "select" in given and (given.get("samples", 1) < 2 or given.get("clip_rerank", 1) > 1):
        raise ValueError(f"{flag('select')} needs {flag('samples')} 2 or more, and cannot be used with {rerank}")
    if uses_clip and "clip" not in given:
        raise ValueError(f"{clip_scale} or {rerank} needs {clip} MODEL:FILE")
    if ancestral and given.get("clip_scale"):
        raise ValueError(f"{clip_scale} guides {sampler} confidence, not ancestral")
