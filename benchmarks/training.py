"""Compare one training step with the paper's Algorithm 1 as printed, OpenCLIP's CLIP and its CoCa.

    python -m benchmarks.training --captions captions_test.json

The aim is that MDC takes no more than 1.10 times the time that its number of multiplications predicts from those of
Algorithm 1 and CLIP. Memory is the peak of one step above weights and gradients, each model in a process of its own.
For a GPU see `benchmarks/gpu.py`.
"""
import argparse
from functools import partial
from statistics import median

import open_clip
import torch

from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.text.special_tokens import valid_tokens

from .captions import evenly_spaced, read_captions
from .contestants import Contestant, contestant, count_flops, random_images, tokenize
from .report import machine, section_parser, write_report
from .turns import alone, peak_growth, ratio, take_turns

NAMES = ("MDC", "Algorithm 1", "CLIP", "CoCa")  # CoCa only in sizes that OpenCLIP has
AIM, AIMED = 1.10, ("Algorithm 1", "CLIP")
LENGTHS = (8, 16, 32, 64, 77)


def make(args: argparse.Namespace, name: str, long: bool) -> tuple[Contestant, torch.Tensor, torch.Tensor]:
    side = contestant(name, args.size)
    text = tokenize(name, args.size, evenly_spaced(read_captions(args.captions), args.batch_size, long))
    return side, random_images(args.batch_size, side.model.visual.image_size[0]), text


def peak_memory(args: argparse.Namespace, name: str, long: bool) -> float:
    (model, loss), *batch = make(args, name, long)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return peak_growth(lambda: loss(*batch).backward())


def compare(args: argparse.Namespace, long: bool) -> list[tuple]:
    sides = {name: make(args, name, long) for name in NAMES
             if name != "CoCa" or f"coca_{args.size}" in open_clip.list_models()}
    mdc, _, text = sides["MDC"]
    tokens = valid_tokens(text, mdc.model.vocab_size).sum(1).float().mean()
    steps = {name: partial(side.step, *batch) for name, (side, *batch) in sides.items()}
    flops = {name: count_flops(step) for name, step in steps.items()}
    taken = take_turns(steps, args.rounds)
    memory = {name: alone(peak_memory, args, name, long) for name in sides}
    rows = []
    for name in list(sides)[1:]:
        count, time = flops[name] / flops["MDC"], ratio(taken[name], taken["MDC"])
        rows.append(("long" if long else "short", f"{tokens:.1f}", name, f"{count:.2f}", f"{time:.2f}",
                     f"{count / time:.2f}", f"{memory['MDC'] / memory[name]:.2f}"))
    return rows


def decoder_cost(args: argparse.Namespace) -> list[tuple[int, float]]:
    """Return (real tokens, seconds) of projection, decoder and loss for several lengths, forward and backward."""
    (model, loss), image, _ = make(args, "MDC", long=False)
    with torch.no_grad():
        patches = model.encode_image_tokens(image)
    model.encode_image_tokens = lambda *_: patches
    texts = {}
    for length in LENGTHS:
        texts[length] = torch.randint(1, model.vocab_size - 2, (args.batch_size, 77))
        texts[length][:, 0], texts[length][:, length - 1:] = model.vocab_size - 2, model.vocab_size - 1

    def step(text: torch.Tensor) -> None:
        model.zero_grad(set_to_none=True)
        loss(image, text).backward()

    taken = take_turns({str(n): partial(step, text) for n, text in texts.items()}, args.rounds)
    return [(args.batch_size * length, median(taken[str(length)])) for length in LENGTHS]


def report(args: argparse.Namespace) -> str:
    before = machine()
    rows = compare(args, long=False) + compare(args, long=True)
    verdict = "\n".join(f"- {row[0]} captions, {row[2]}: {row[5]}, {'met' if float(row[5]) <= AIM else 'missed'}"
                        for row in rows if row[2] in AIMED)
    cost = decoder_cost(args)
    captions = "Flickr8k's or other real captions from a file" if args.captions else "made-up captions"
    return "\n\n".join([
        before,
        f"Forward and backward, {args.size}, batch {args.batch_size}, {args.rounds} rounds, {captions}. Algorithm 1 "
        "computes 77 positions and the logits of all of them, and gathers the masked ones before the loss. "
        "Multiplications by torch's FlopCounterMode. Memory is the peak of a step above weights and gradients.",
        markdown_table(("captions", "real tokens", "against", "multiplications / MDC's", "time / MDC's",
                        "MDC's time / predicted", "memory: MDC's share"), rows),
        "MDC's predicted time is the other side's time divided by the ratio of multiplications. The aim is that MDC "
        f"takes at most {AIM:.2f} times the time predicted from {' and '.join(AIMED)}:", verdict,
        markdown_table(("real tokens of the batch", *(tokens for tokens, _ in cost)),
                       [("image projection, decoder and loss: time / that of the shortest",
                         *(f"{s / cost[0][1]:.2f}" for _, s in cost))]),
    ])


def main() -> None:
    write_report("Training step", report,
                 section_parser(__doc__, "captions", "size", "rounds", "batch-size").parse_args())


if __name__ == "__main__":
    main()
