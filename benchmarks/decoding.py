"""Speed of decoding captions against the plain loop, one token per step and beam search without a cache.

    python benchmarks/decoding.py --out decoding.md                 2 to 3 minutes on 2 CPU cores

Only ratios taken in one run mean anything: the sides take turns, and the median over the rounds is reported.

ViT-B/32 with random weights, which decode at the speed of trained ones. `plain` is masked diffusion decoding as a first
draft would have it: at every step the image encoded again, all 77 positions decoded, all their logits computed. Each of
its steps does the same work, so a third of the 15 is timed and counted three times.

Dimensions: B images, L = 77 positions, V vocabulary.
"""
import argparse
import os
import statistics
import time
from functools import partial

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import open_clip_mdc
from open_clip_mdc.beam import beam_search
from open_clip_mdc.generate import cached_step_logits
from open_clip_mdc.interface import StepLogits
from open_clip_mdc.model import Captioner
from open_clip_mdc.tokens import mask_id, valid_tokens
from open_clip_mdc.unmask import fully_masked

LENGTH = 15
TIMED_STEPS = 5
ARC_LENGTH = 20
ARC_IMAGES = 8


@torch.no_grad()
def plain(model: Captioner, image: Tensor, steps: int) -> Tensor:
    """The first `steps` of Eq. 6, everything computed anew at each."""
    vocab_size = model.vocab_size
    start = fully_masked(torch.full((len(image),), LENGTH), vocab_size)
    text = F.pad(start, (0, model.context_length - start.shape[1]))
    valid = valid_tokens(text, vocab_size)
    rows = torch.arange(len(image))
    for _ in range(steps):
        probability, token = model.logits(image, text, valid).softmax(-1).max(-1)
        best = probability.masked_fill(text != mask_id(vocab_size), -1).argmax(1)
        text[rows, best] = token[rows, best]
    return text


def uncached_step_logits(model: Captioner, image_kv: list) -> StepLogits:
    """What `generate.cached_step_logits` gives, by decoding the whole text at each step; its last token's logits."""
    def step_logits(text: Tensor, parent: Tensor) -> Tensor:
        text = F.pad(text, (0, 1))  # the token asked for; a causal model does not look at it
        asked = torch.zeros_like(text, dtype=torch.bool)
        asked[:, -1] = True
        valid = torch.ones_like(asked)
        valid[:, -1] = False
        return model.token_logits(image_kv, text, valid, asked)

    return step_logits


@torch.no_grad()
def search(model: Captioner, image: Tensor, make_step_logits) -> Tensor:
    image_kv = model.text.project_image(model.encode_image_tokens(image))
    return beam_search(make_step_logits(model, image_kv), len(image), model.vocab_size, ARC_LENGTH).text


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(mdc: Captioner, arc: Captioner, batch_size: int, rounds: int) -> list[tuple[str, str, int, list, list]]:
    """Rows (side, baseline, images, seconds of the side, seconds of the baseline), one entry per round."""
    image = torch.randn(batch_size, 3, 224, 224)
    sides = {
        "plain": (partial(plain, mdc, image, TIMED_STEPS), LENGTH / TIMED_STEPS),
        "one": (partial(mdc.generate, image, length=LENGTH), 1),
        "three": (partial(mdc.generate, image, length=LENGTH, tokens_per_step=3), 1),
        "uncached": (partial(search, arc, image[:ARC_IMAGES], uncached_step_logits), 1),
        "cached": (partial(search, arc, image[:ARC_IMAGES], cached_step_logits), 1),
    }
    for name in ("one", "cached"):  # warm up
        sides[name][0]()
    taken = {name: [] for name in sides}
    for _ in tqdm(range(rounds), unit="round"):
        for name, (function, scale) in sides.items():
            taken[name].append(seconds(function) * scale)
    return [
        (f"MDC, {LENGTH} tokens", "plain loop", batch_size, taken["one"], taken["plain"]),
        (f"MDC, {LENGTH} tokens, tokens_per_step=3", "one token per step", batch_size, taken["three"], taken["one"]),
        (f"ARC, {ARC_LENGTH} tokens, beam 6, cache", "no cache", ARC_IMAGES, taken["cached"], taken["uncached"]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="write the table here, too")
    args = parser.parse_args()
    open_clip_mdc.register()
    torch.manual_seed(0)
    mdc, arc = (open_clip.create_model(name).eval() for name in ("MDC-ViT-B-32", "ARC-ViT-B-32"))
    lines = [
        f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, ViT-B/32, median of {args.rounds} rounds",
        "",
        "| | images | seconds | images/s | baseline | seconds | times faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, baseline, images, ours, theirs in compare(mdc, arc, args.batch_size, args.rounds):
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        a, b = statistics.median(ours), statistics.median(theirs)
        lines.append(f"| {side} | {images} | {a:.2f} | {images / a:.2f} | {baseline} | {b:.2f} | {ratio:.1f} |")
    table = "\n".join(lines)
    print(table)
    if args.out:
        with open(args.out + ".tmp", "w") as file:
            file.write(table + "\n")
        os.replace(args.out + ".tmp", args.out)


if __name__ == "__main__":
    main()
