"""The flags that this package adds to `clip_benchmark eval`, and what they ask of a captioner.

Imports no torch before a model is there: `--help` is quick.
"""
import argparse
from collections import namedtuple
from collections.abc import Sequence
from typing import TYPE_CHECKING

from open_clip_mdc.decoding import options as decoding
from open_clip_mdc.errors import finite, number_from
from open_clip_mdc.integration.configs import ROWS

if TYPE_CHECKING:
    from open_clip_mdc.objectives.base import CaptionCfg
    from open_clip_mdc.objectives.registry import Objective

MDC_LENGTH = 15  # tokens, one of the paper's; an autoregressive model ends its captions by itself
NUM_BEAMS = 6  # the paper's
FEATURES = ("gap", "cls", "pooled", "pixels")
TASKS = ("auto", "captioning", "cloze", "image_caption_selection", "linear_probe", "probe", "segmentation",
         "zeroshot_classification", "zeroshot_retrieval")
DECODING = tuple("caption_length" if name == "length" else name for name in decoding.OPTIONS)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    objectives = dict.fromkeys(row["objective"] for row in ROWS.values())
    parser.add_argument_group("tasks of this package").add_argument(
        "--task", choices=TASKS, default="auto",
        help="beside clip_benchmark's own: probe (k-NN, linear and attentive probes and a sweep over layers, beside an "
             "untrained network and pixels), segmentation (a linear layer on patch tokens), cloze (words of captions "
             "that are hidden and filled in)")
    group = parser.add_argument_group("captioners", "--model takes the name of a config, such as MDC-ViT-B-32, or an "
                                      f"objective alone ({', '.join(objectives)}), whose architecture is that of the "
                                      "run or checkpoint given by --pretrained")
    group.add_argument("--plugin", action="append", metavar="MODULE",
                       help="module or file.py that registers the model's objective; may be given several times")
    group.add_argument("--scorer", choices=["heuristic", "monte_carlo", "autoregressive", "bound", "cosine"],
                       help="likelihood of a caption; default: heuristic for MDC, autoregressive for ARC, "
                            "bound for MCD; cosine is of captioners that learnt to contrast, too (-contrastive)")
    group.add_argument("--num_samples", type=number_from(1), default=1024,
                       help="draws per caption of monte_carlo and bound (default and paper: 1024)")
    group.add_argument("--stop_confidence", type=float,
                       help="monte_carlo: stop drawing once the leader is this certain, e.g. 0.999; for plain scores "
                            "of one image's captions, without a debiased row")
    group.add_argument("--trained_interval", action="store_true",
                       help="monte_carlo: only mask counts of the interval of t that the model was trained on")
    group.add_argument("--alpha", type=finite, default=1.0,
                       help="debiased scores: log p(c|image) - alpha * log p(c) (default: 1)")
    group.add_argument("--shortlist", type=number_from(1), metavar="K",
                       help="retrieval, with --clip: score only the K best by its cosine, in both directions")
    group.add_argument("--perturbations", help="ARO Order: frozen negatives (made at first use if absent)")
    group.add_argument("--feature", choices=FEATURES,
                       help="linear probe, probe; default: gap for captioners, cls before the projection for CLIP (the "
                            "paper's); pooled is what clip_benchmark itself probes")
    group.add_argument("--image_size", type=number_from(1),
                       help="probe and segmentation of --model timm-NAME: side of the images; default: the encoder's")
    group.add_argument("--save_probe", help="linear probe: write the classifier to this safetensors file")
    group.add_argument("--corruption", metavar="NAME:SEVERITY",
                       help="make test images worse, by gaussian_noise, gaussian_blur, jpeg or brightness, 1 to 5; 0 "
                            "changes nothing")
    for title, names in (("decoding of captions", [name for name in decoding.OPTIONS if name not in decoding.OF_CLIP]),
                         ("help from a CLIP model", decoding.OF_CLIP)):
        decoding.add_flags(parser.add_argument_group(title), names,
                           lambda name: f"--{'caption_' * (name == 'length')}{name}")
    group.add_argument("--train_captions", metavar="SHARDS|TXT",
                       help="captioning, with --samples: the share of captions that these do not have")
    group.add_argument("--phrase", help="captioning: how often this is said of images whose references say it, and of "
                                        "others")
    group.add_argument("--save_captions",
                       help="captioning: file of the captions, a template like --output; default: captions/ beside it")
    group.add_argument("--save_coco_results", metavar="FILE",
                       help="captioning: write the captions in COCO's results format, too; a template like --output")
    group.add_argument("--cloze_words", metavar="JSON",
                       help="cloze: the words that are asked for, {kind: [words]}; default: colours, numbers, "
                            "prepositions, and the captions' own frequent nouns and verbs")
    group.add_argument("--clipscore_model", help="captioning: CLIPScore by this model, e.g. ViT-B-32-quickgelu")
    group.add_argument("--clipscore_pretrained", help="its weights: a file, or a tag of OpenCLIP, which is downloaded")
    return parser


DEFAULTS = vars(make_parser().parse_args([]))
Flags = namedtuple("Flags", DEFAULTS, defaults=DEFAULTS.values())  # read-only


def read_flags(argv: Sequence[str]) -> tuple[Flags, list[str]]:
    parsed, rest = make_parser().parse_known_args(argv)
    return Flags(**vars(parsed)), rest


# Of a task: clip_benchmark's arguments, our flags and the model's caption_cfg (None of a model that is no captioner of
# ours) -> arguments of the method that it calls.


def objective_of(cfg: "CaptionCfg") -> "Objective":
    from open_clip_mdc.objectives.registry import OBJECTIVES
    return OBJECTIVES[cfg.objective]


def scoring_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    """Return arguments of `log_likelihood`, and alpha."""
    if cfg is None:
        return {}
    scorers = (*objective_of(cfg).scorers, *["cosine"] * (cfg.contrastive_weight > 0))  # the default first
    method = flags.scorer or scorers[0]
    if method not in scorers:
        raise ValueError(f"--scorer {method} does not fit this model: choose {' or '.join(scorers)}")
    options = {"method": method, "alpha": flags.alpha}
    if method == "monte_carlo":
        return options | dict(num_samples=flags.num_samples, stop_confidence=flags.stop_confidence,
                              interval=(cfg.t_min, cfg.t_max) if flags.trained_interval else None)
    if flags.stop_confidence is not None or flags.trained_interval:
        raise ValueError(f"--stop_confidence and --trained_interval are options of --scorer monte_carlo, not {method}")
    return options | ({"num_samples": flags.num_samples} if method == "bound" else {})


def cloze_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    return {} if cfg is None else {"alpha": flags.alpha}


def retrieval_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    if cfg is None:
        return {}
    if flags.stop_confidence is not None:
        raise ValueError("--stop_confidence finds the best caption of an image, and retrieval ranks all: leave it out")
    if flags.shortlist and flags.scorer == "cosine":
        raise ValueError("--shortlist is what likelihoods are computed of: leave it out with --scorer cosine")
    if (flags.clip is None) != (flags.shortlist is None):
        raise ValueError("--shortlist K and --clip MODEL:FILE go together: what is scored, and who chooses it")
    if flags.shortlist and flags.shortlist < max(args.recall_k):
        raise ValueError(f"--shortlist {flags.shortlist} should be at least --recall_k {max(args.recall_k)}")
    return scoring_options(args, flags, cfg) | (
        {"clip": flags.clip, "shortlist": flags.shortlist} if flags.clip else {})


def check_samples(flags: Flags, drawn: bool) -> None:
    if (flags.samples or 2) < 2 or flags.samples and not drawn:
        raise ValueError("--samples needs a temperature, and to be 2 or more")
    if flags.samples and flags.clip_rerank:
        raise ValueError("--clip_rerank keeps one of the captions that it draws: leave out --samples")
    if flags.train_captions and (flags.select or not flags.samples):
        raise ValueError("--train_captions is of --samples, whose diversity it is compared with")


def decoding_options(args: argparse.Namespace, flags: Flags, cfg: "CaptionCfg | None") -> dict:
    """Return arguments of `generate` and the fields of `Sampling`."""
    from open_clip_mdc.objectives.replace import STEPS
    if cfg is None and flags.clip:
        raise ValueError(f"--clip helps captioners, such as MDC- and ARC-; {args.model} is none")
    causal = cfg is None or objective_of(cfg).order == "causal"
    ancestral = flags.sampler == "ancestral"
    asked = {name.removeprefix("caption_"): value for name in DECODING if (value := getattr(flags, name)) is not None}
    decoding.check_kind(asked, causal, "--{}".format)
    decoding.check(asked, "--{}".format)
    if causal:
        default = {"length": "auto", "num_beams": NUM_BEAMS}
    else:
        default = {"length": MDC_LENGTH, **({"steps": STEPS} if ancestral else {"tokens_per_step": 1}),
                   **({"guidance_weak": cfg.default_uncond} if decoding.guides(asked) else {})}
    options = default | asked
    drawn = options.get("temperature") or options["length"] in ("sample", "likely") or ancestral \
        or options.get("guidance_weak") == "masked"
    check_samples(flags, bool(drawn))
    return options | ({"seed": args.seed, "batch_size": args.batch_size} if drawn else {})
