"""Compare caption likelihoods with a plain loop, in speed and memory.

    python -m benchmarks.scoring --captions captions_test.json

It takes 2 to 3 minutes on 2 CPU cores. The first table checks that both sides agree.
"""
import argparse
from functools import partial
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.likelihood.exact import Likelihood
from open_clip_mdc.models.captioner import Captioner

from . import plain
from .captions import evenly_spaced, read_captions
from .contestants import contestant, random_images, tokenize
from .report import machine, section_parser, write_report
from .turns import CLEAR_PEAK, alone, peak_growth, ratio, take_turns

PLAIN_DRAWS, DRAWS = 6, 64  # per caption. The ratio compares the time of a draw
BUDGET_MIB, CANDIDATES = 256, (2, 200)


def ours(model: Captioner, image: Tensor, text: Tensor, method: str, **options) -> Likelihood:
    return model.log_likelihood(image, text, method, return_details=True, **options)


def speed(size: str, captions: list[str], rounds: int) -> list[tuple]:
    model = contestant("MDC", size).model.eval()
    text = tokenize("MDC", size, evenly_spaced(captions, 4)).view(2, 2, -1)
    image = random_images(2, model.visual.image_size[0])
    cases = list(zip(image, text, strict=True))
    expected = torch.stack([plain.heuristic(model, *case) for case in cases])
    found = ours(model, image, text, "heuristic").log_likelihood
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)
    drawn = int(ours(model, image, text, "monte_carlo", num_samples=DRAWS).draws.sum())
    rows, count = [], text[..., 0].numel()
    for method, unit, slow, slow_units, fast, fast_units in (
            ("heuristic", "caption", lambda: [plain.heuristic(model, *case) for case in cases], count,
             partial(ours, model, image, text, "heuristic"), count),
            ("monte_carlo", "draw", lambda: [plain.draws(model, *case, PLAIN_DRAWS) for case in cases],
             PLAIN_DRAWS * count, partial(ours, model, image, text, "monte_carlo", num_samples=DRAWS), drawn)):
        taken = take_turns({"plain": slow, "ours": fast}, rounds)
        a, b = ([s / units for s in taken[side]] for side, units in (("plain", slow_units), ("ours", fast_units)))
        rows.append((method, unit, f"{1000 * median(a):.0f}", f"{1000 * median(b):.1f}", f"{ratio(a, b):.1f}"))
    return rows


def peak_memory(method: str, size: str, candidates: int, captions: list[str]) -> float:
    model = contestant("MDC", size).model.eval()
    text = tokenize("MDC", size, captions)[None]
    image = random_images(1, model.visual.image_size[0])
    model.log_likelihood(image, text[:, :1], method, num_samples=1)  # warms up: thread pools and the like
    return peak_growth(lambda: model.log_likelihood(image, text[:, :candidates], method, num_samples=8,
                                                    memory_mib=BUDGET_MIB))


def memory(size: str, captions: list[str]) -> list[tuple]:
    short = sorted(set(captions), key=lambda caption: (len(caption.split()), caption))[:max(CANDIDATES)]
    if len(short) < max(CANDIDATES):
        raise ValueError(f"--captions has {len(short)} different captions. The memory table needs {max(CANDIDATES)}")
    rows = []
    for method in tqdm(("heuristic", "monte_carlo"), desc="memory"):
        found = [alone(peak_memory, method, size, candidates, short) for candidates in CANDIDATES]
        rows.append((method, BUDGET_MIB, *(f"{mib:.0f}" for mib in found)))
    return rows


def report(args: argparse.Namespace) -> str:
    captions = read_captions(args.captions)
    text = [machine(),
            f"{args.size}, two images with two captions each, {args.rounds} rounds. The plain loop encodes the image "
            "once, and decodes 77 positions and computes all their logits at every step and draw.",
            markdown_table(("estimator", "per", "plain loop, ms", "ours, ms", "times faster"),
                           speed(args.size, captions, args.rounds))]
    if CLEAR_PEAK.exists():
        text += ["Peak memory above the model's:",
                 markdown_table(("estimator", "budget, MiB", *(f"{c} candidates, MiB" for c in CANDIDATES)),
                                memory(args.size, captions))]
    return "\n\n".join(text)


def main() -> None:
    write_report("Scoring", report, section_parser(__doc__, "captions", "size", "rounds").parse_args())


if __name__ == "__main__":
    main()
