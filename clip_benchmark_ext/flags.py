"""The flags that this package adds to `clip_benchmark eval`, and the arguments that they become for a captioner.

Imports no torch before a model is loaded, so that `--help` is quick.
"""
import argparse
import json
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING

from open_clip_mdc.decoding import options as decoding
from open_clip_mdc.decoding.rules import SAMPLERS
from open_clip_mdc.integration.configs import ROWS
from open_clip_mdc.integration.decoding_flags import OF_CLIP, OPTIONS, add_flags, add_row

if TYPE_CHECKING:
    from open_clip_mdc.objectives.config import CaptionCfg
    from open_clip_mdc.objectives.registry import Objective

MDC_LENGTH = 15  # tokens, one of the paper's lengths
NUM_BEAMS = 6  # the paper's
TASKS = ("auto captioning cloze image_caption_selection linear_probe probe segmentation zeroshot_classification "
         "zeroshot_retrieval").split()
DECODING = {name: f"{'caption_' * (name == 'length')}{name}" for name in OPTIONS}  # the flags


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    objectives = dict.fromkeys(row["objective"] for row in ROWS.values())
    parser.add_argument_group("tasks of this package").add_argument(
        "--task", choices=TASKS, default="auto",
        help="task to run: clip_benchmark's own, or probe (k-NN, linear and attentive probes of all layers, compared "
             "with an untrained network and pixels), segmentation (a linear layer on patch tokens) or cloze (fill in "
             "masked words of captions) (default: auto, chosen by the data set)")
    group = parser.add_argument_group("captioners", "--model takes the name of a config, such as MDC-ViT-B-32, or an "
                                      f"objective alone ({', '.join(objectives)}). The architecture is then that of "
                                      "the run or checkpoint of --pretrained.")
    for row in json.loads(Path(__file__).with_name("flags.json").read_bytes()):
        add_row(group, row)
    for title, names in (("decoding of captions", [name for name in OPTIONS if name not in OF_CLIP]),
                         ("help from a CLIP model", OF_CLIP)):
        add_flags(parser.add_argument_group(title), names, lambda name: f"--{DECODING[name]}")
    return parser


DEFAULTS = vars(make_parser().parse_args([]))
Flags = namedtuple("Flags", DEFAULTS, defaults=DEFAULTS.values())  # read-only


def filled(flag: str, template: str, **values: str) -> str:
    """Return a template with its {NAME} replaced. Raises ValueError, with the flag, for other braces."""
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError) as problem:
        raise ValueError(f"{flag} {template}: only {' '.join(f'{{{name}}}' for name in values)} are replaced, and "
                         "another brace is written twice") from problem


# Each function below maps clip_benchmark's arguments, our flags and the model's caption_cfg (None if it is not one of
# our captioners) to the arguments of the method that a task calls.


def objective_of(cfg: "CaptionCfg") -> "Objective":
    from open_clip_mdc.objectives.registry import OBJECTIVES
    return OBJECTIVES[cfg.objective]


def scorers_of(args: argparse.Namespace, cfg: "CaptionCfg | None") -> tuple[str, ...]:
    """Return what --scorer can be, the default first. It is empty for a model that is no captioner."""
    if cfg is None:
        from .foreign import scorers
        return scorers(args.model)
    return (*objective_of(cfg).scorers, *["cosine"] * (cfg.contrastive_weight > 0))


def scoring_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    """Return the arguments of `log_likelihood`, and alpha. They are empty for a model of others that goes by cosine."""
    scorers = scorers_of(args, cfg)
    if cfg is None and not scorers:
        return {}
    method = flags.scorer or next(iter(scorers), None)
    if method not in scorers:
        raise ValueError(f"--scorer {method} does not fit this model: choose {' or '.join(scorers)}" if scorers else
                         "this model can only fill in words of captions: it has no --scorer")
    if cfg is None and method == "cosine":
        return {}
    options = {"method": method, "alpha": flags.alpha}
    if method in ("monte_carlo", "bound"):
        options["num_samples"] = flags.num_samples
    if method == "monte_carlo":
        options["interval"] = None  # as in results of older versions
    return options


def cloze_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    return {"alpha": flags.alpha} if cfg is not None or scorers_of(args, cfg) else {}


def retrieval_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    options = scoring_options(args, flags, cfg)
    if not options:
        return {}
    if flags.shortlist and flags.scorer == "cosine":
        raise ValueError("--shortlist is for likelihoods: leave it out with --scorer cosine")
    if flags.clip and not flags.shortlist:
        raise ValueError("--clip MODEL:FILE needs --shortlist K, the number of pairs that it chooses")
    if flags.shortlist and flags.shortlist < max(args.recall_k):
        raise ValueError(f"--shortlist {flags.shortlist} should be at least --recall_k {max(args.recall_k)}")
    if flags.shortlist and not flags.clip and (
            "parallel" not in scorers_of(args, cfg) or options["method"] == "parallel"):
        raise ValueError("--shortlist K without --clip MODEL:FILE needs a model with --scorer parallel, and a better "
                         "--scorer for the second stage")
    return options | {name: value for name, value in (("clip", flags.clip), ("shortlist", flags.shortlist))
                      if value is not None}


def check_samples(flags: Flags) -> None:
    if flags.samples == 1:
        raise ValueError("--samples should be 2 or more: without it one caption is decoded")
    if flags.samples and flags.clip_rerank:
        raise ValueError("--clip_rerank keeps one of the captions that it draws: leave out --samples")
    if flags.train_captions and (flags.select or not flags.samples):
        raise ValueError("--train_captions is for the diversity of several captions: give --samples, without --select")


def decoding_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    """Return the arguments of `generate` and the fields of `Sampling`."""
    from open_clip_mdc.objectives.replace import STEPS
    if cfg is None and flags.clip:
        raise ValueError(f"--clip needs a captioner, such as MDC- and ARC- models, which {args.model} is not")
    if cfg and not objective_of(cfg).scorers:
        raise ValueError("this model can only fill in words of captions: evaluate it by --task cloze or linear_probe")
    asked = {name: value for name in OPTIONS if (value := getattr(flags, DECODING[name])) is not None}
    several = asked | {"samples": flags.samples} if flags.samples else asked
    causal = decoding.searches(several, cfg and objective_of(cfg))
    decoding.check_clip(asked)
    check_samples(flags)
    sampling = decoding.Sampling(flags.temperature or 0.0, flags.top_k, flags.top_p)
    wanted = decoding.checked(asked | {"samples": flags.samples or flags.clip_rerank or 1}, causal, sampling)
    if causal:
        default = {"length": "auto", "num_beams": NUM_BEAMS}
        if cfg and objective_of(cfg).order != "causal":
            default["sampler"] = decoding.BEAM  # a length would ask for unmasking
    else:
        reads = SAMPLERS[wanted.sampler].options
        default = {"length": MDC_LENGTH,
                   **{name: value for name, value in (("steps", STEPS), ("tokens_per_step", 1)) if name in reads},
                   **({"uncond": cfg.default_uncond} if decoding.guides(asked) else {})}
    options = default | asked
    draws = wanted.draws or options.get("uncond") == "masked_image"
    return options | ({"seed": args.seed, "batch_size": args.batch_size} if draws else {})
