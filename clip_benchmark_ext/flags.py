"""The flags that captioners add to `clip_benchmark eval`. Upstream's parser never sees them."""
import argparse

options = argparse.Namespace()  # of this command; hooks read it, as upstream passes them nothing but its own arguments


def caption_length(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor auto")
    return int(text)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    group = parser.add_argument_group("captioners (MDC, ARC), beside the options above")
    group.add_argument("--scorer", choices=["heuristic", "monte_carlo", "autoregressive"],
                       help="likelihood of a caption; default: heuristic for MDC, autoregressive for ARC")
    group.add_argument("--num_samples", type=int, default=1024, help="draws per caption of monte_carlo (paper: 1024)")
    group.add_argument("--stop_confidence", type=float,
                       help="monte_carlo: stop drawing once the leader is this certain, e.g. 0.999")
    group.add_argument("--trained_interval", action="store_true",
                       help="monte_carlo: only mask counts of the interval of t that the model was trained on")
    group.add_argument("--alpha", type=float, default=1.0, help="debiased score: log p(c|image) - alpha * log p(c)")
    group.add_argument("--perturbations", help="ARO Order: frozen negatives (made at first use if absent)")
    group.add_argument("--feature", choices=["gap", "cls", "pooled"],
                       help="linear probe; default: gap for captioners, cls before the projection for CLIP (the "
                            "paper's); pooled is what clip_benchmark itself probes")
    group.add_argument("--save_probe", help="linear probe: write the classifier to this safetensors file")
    group.add_argument("--caption_length", type=caption_length,
                       help="captioning: tokens of a caption, or auto; default: 15 for MDC; ARC ends its captions by "
                            "itself and takes this as the most")
    group.add_argument("--tokens_per_step", type=int, help="captioning, MDC: tokens revealed at a time (default: 1)")
    group.add_argument("--num_beams", type=int, help="captioning, ARC: width of the beam (default: 6)")
    group.add_argument("--save_captions",
                       help="captioning: file of the captions, a template like --output; default: captions/ beside it")
    group.add_argument("--clipscore_model", help="captioning: CLIPScore by this model, e.g. ViT-B-32-quickgelu")
    group.add_argument("--clipscore_pretrained", help="its weights: a file, or a tag of OpenCLIP, which is downloaded")
    return parser


def set_options(argv: list[str]) -> list[str]:
    """Reads our flags and returns the others."""
    parsed, rest = make_parser().parse_known_args(argv)
    vars(options).clear()
    vars(options).update(vars(parsed), captioning=False)
    return rest


set_options([])
