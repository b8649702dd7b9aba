"""Compare decoding with a plain loop, with one token per step, and with beam search and blocks without a cache.

    python -m benchmarks.decoding                                   5 minutes on 2 CPU cores

It also measures what guidance by CLIP costs. Each step of the plain loop (`plain.unmask`) does the same work. So only a
third of its 15 steps is timed and counted three times. The encoder is timed once.
"""
import argparse
from functools import partial
from statistics import median

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from open_clip_mdc.data.markdown import markdown_table
from open_clip_mdc.decoding.beam import beam_search
from open_clip_mdc.decoding.blocks import rows_of, unmask_blocks
from open_clip_mdc.decoding.clip_guidance import Clip, Guide
from open_clip_mdc.decoding.generate import cached_step_logits
from open_clip_mdc.decoding.options import Unmasking
from open_clip_mdc.models.caption_logits import BlockReader
from open_clip_mdc.models.captioner import Captioner
from open_clip_mdc.models.interface import StepLogits

from .contestants import contestant, random_images
from .plain import encode, unmask
from .report import machine, section_parser, write_report
from .turns import ratio, take_turns

LENGTH, TIMED_STEPS = 15, 5
ARC_LENGTH, ARC_IMAGES = 20, 8
GUIDED_IMAGES = 4
BLOCK = 4


def uncached_step_logits(model: Captioner, image_kv: list) -> StepLogits:
    def step_logits(text: Tensor, parent: Tensor) -> Tensor:
        text = F.pad(text, (0, 1))  # a place for the token to predict, which a causal model does not attend to
        rows, length = text.shape
        last = torch.arange(1, rows + 1, device=text.device) * length - 1
        return model.token_logits(image_kv, [length] * rows)(text, last)

    return step_logits


@torch.no_grad()
def search(model: Captioner, image: Tensor, make_step_logits) -> Tensor:
    return beam_search(make_step_logits(model, encode(model, image)), len(image), model.vocab_size, ARC_LENGTH).text


class ForgetfulReader(BlockReader):
    """A reader of blocks that keeps no keys and values. It reads all finished tokens again at each step."""

    finished: tuple[Tensor, ...] = ()

    def logits(self, text: Tensor, predicted: Tensor) -> Tensor:
        if self.finished:
            _, self.past = self.decoder.step(torch.cat(self.finished, 1), self.image_kv, None)
        return super().logits(text, predicted)

    def keep(self, block: Tensor) -> None:
        self.finished += (block,)


@torch.no_grad()
def caption_in_blocks(model: Captioner, image: Tensor, reader: type[BlockReader]) -> Tensor:
    network = reader(model.text, encode(model, image))
    rows = rows_of(model, None, ARC_LENGTH, image.device).expand(len(image), -1)
    return unmask_blocks(network, network.keep, rows, BLOCK, model.vocab_size, Unmasking(), ()).text


def guide_by_clip(model: Captioner, clip: Clip, image: Tensor) -> Tensor:
    return model.generate(image, length=LENGTH, guide=Guide(clip, image, clip.tokenizer, scale=1.0))


def compare(size: str, batch_size: int, rounds: int) -> list[tuple]:
    """Return rows (side, images, seconds, images/s, baseline, its seconds, times faster)."""
    mdc, arc, blocks = (contestant(*of).model.eval() for of in (
        ("MDC", size), ("ARC", size), ("MDC", f"{size}-b{BLOCK}")))
    image = random_images(batch_size, mdc.visual.image_size[0])
    few, fewer = image[:ARC_IMAGES], image[:GUIDED_IMAGES]
    clip = Clip(contestant("CLIP", size).model.eval(), None, open_clip.get_tokenizer(size))
    taken = take_turns({
        "encoder": partial(encode, mdc, image),
        "plain": partial(unmask, mdc, image, LENGTH, TIMED_STEPS),
        "one": partial(mdc.generate, image, length=LENGTH),
        "three": partial(mdc.generate, image, length=LENGTH, tokens_per_step=3),
        "uncached": partial(search, arc, few, uncached_step_logits),
        "cached": partial(search, arc, few, cached_step_logits),
        "again": partial(caption_in_blocks, blocks, few, ForgetfulReader),
        "kept": partial(caption_in_blocks, blocks, few, BlockReader),
        "guided": partial(guide_by_clip, mdc, clip, fewer),
        "unguided": partial(mdc.generate, fewer, length=LENGTH),
    }, rounds)
    taken["plain"] = [e + (p - e) * LENGTH / TIMED_STEPS for e, p in zip(taken["encoder"], taken["plain"], strict=True)]
    rows = []
    for side, ours, images, baseline, theirs in (
            (f"MDC, {LENGTH} tokens", "one", len(image), "plain loop", "plain"),
            (f"MDC, {LENGTH} tokens, tokens_per_step=3", "three", len(image), "one token per step", "one"),
            (f"ARC, {ARC_LENGTH} tokens, beam 6, cache", "cached", len(few), "no cache", "uncached"),
            (f"blocks of {BLOCK}, {ARC_LENGTH} tokens, keys and values kept", "kept", len(few), "not kept", "again"),
            (f"MDC, {LENGTH} tokens, guided by CLIP, 5 candidates", "guided", len(fewer), "no guidance", "unguided")):
        a, b = median(taken[ours]), median(taken[theirs])
        rows.append((side, images, f"{a:.2f}", f"{images / a:.2f}", baseline, f"{b:.2f}",
                     f"{ratio(taken[theirs], taken[ours]):.2g}"))
    return rows


def report(args: argparse.Namespace) -> str:
    before = machine()
    table = markdown_table(("", "images", "seconds", "images/s", "baseline", "its seconds", "times faster"),
                           compare(args.size, args.batch_size, args.rounds))
    return (f"{before}\n\n{args.size}, {args.rounds} rounds. The plain loop encodes the image once, and decodes 77 "
            f"positions and computes all their logits at every step.\n\n{table}")


def main() -> None:
    write_report("Decoding", report, section_parser(__doc__, "size", "rounds", "batch-size").parse_args())


if __name__ == "__main__":
    main()
