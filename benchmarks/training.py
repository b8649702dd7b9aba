"""Speed and memory of one training step against Algorithm 1 to the letter, OpenCLIP's CLIP and its CoCa.

    python benchmarks/training.py --captions captions_test.json                 CPU, fp32, batch 16
    python benchmarks/training.py --captions captions_test.json --device cuda   amp_bf16, batch 1,024

Only ratios taken in one run mean anything: the contestants take turns, and the median over the rounds is reported.
Memory is the peak of one step above weights and gradients, in a process of its own per contestant.

Contestants, all ViT-B/32 (or --size) with their own loss, forward and backward:
    MDC           this package
    Algorithm 1   the same network as the paper's pseudocode has it: 77 positions, logits at all of them
    CLIP, CoCa    OpenCLIP's models and losses
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import open_clip
import torch
import torch.nn.functional as F
from open_clip_train.precision import get_autocast

import open_clip_mdc
from open_clip_mdc.objective import CaptionLoss
from open_clip_mdc.tokens import valid_tokens

PEAK_BF16 = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}  # dense FLOP/s, vendors' data sheets


def read_captions(path: str) -> list[str]:
    """Captions of a text file (one a line) or of a json file in COCO's layout ("annotations" or id -> captions)."""
    text = Path(path).read_text(encoding="utf-8")
    if not path.endswith(".json"):
        return [line for line in text.splitlines() if line.strip()]
    data = json.loads(text)
    return [a["caption"] for a in data["annotations"]] if "annotations" in data else sum(data.values(), [])


def make_captions(path: str, batch_size: int, long: bool) -> list[str]:
    """The file's captions at even distances; long ones join neighbours until 77 tokens are full."""
    captions = read_captions(path)
    stride = max(1, len(captions) // batch_size)
    starts = [i * stride % len(captions) for i in range(batch_size)]
    return [" ".join(captions[i:i + 12]) if long else captions[i] for i in starts]


def algorithm_1(model):
    """loss = 1/t * cross_entropy(logits[masked], caption[masked]), logits of all positions computed first."""
    def step(image, text):
        corrupted = model.corrupt(text)
        logits = model.logits(image, corrupted.text, valid_tokens(text, model.vocab_size))
        nll = F.cross_entropy(logits.float().flatten(0, 1), text.flatten(), reduction="none").view_as(text)
        return CaptionLoss()(nll, corrupted.token_weight, corrupted.token_target)
    return step


def contestant(name: str, size: str, device: str, precision: str):
    """The model, and a function (image, text) -> loss."""
    kinds = {"MDC": f"MDC-{size}", "Algorithm 1": f"MDC-{size}", "CLIP": size, "CoCa": f"coca_{size}"}
    torch.manual_seed(0)
    open_clip_mdc.register()
    model = open_clip.create_model(kinds[name], device=device, precision=precision, output_dict=True).train()
    if name == "Algorithm 1":
        return model, algorithm_1(model)
    loss = {"MDC": CaptionLoss, "CLIP": open_clip.ClipLoss, "CoCa": lambda: open_clip.CoCaLoss(
        caption_loss_weight=2.0, clip_loss_weight=1.0)}[name]()
    return model, lambda image, text: sum(loss(**model(image, text), output_dict=True).values())


def make_batch(args, name: str, long: bool):
    size = f"coca_{args.size}" if name == "CoCa" else args.size
    text = open_clip.get_tokenizer(size)(make_captions(args.captions, args.batch_size, long))
    image = torch.randn(args.batch_size, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    return image.to(args.device), text.to(args.device)


def timed_step(step, model, batch, args) -> float:
    """Seconds of one forward and backward."""
    model.zero_grad(set_to_none=True)
    if args.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    with get_autocast(args.precision, args.device)():
        loss = step(*batch)
    loss.backward()
    if args.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_speed(args, names: list[str], long: bool) -> dict[str, float]:
    """Median seconds of a step; the contestants take turns."""
    sides = {n: (*contestant(n, args.size, args.device, args.precision), make_batch(args, n, long)) for n in names}
    if args.torchcompile:
        sides = {n: (m, torch.compile(s), b) for n, (m, s, b) in sides.items()}
    seconds: dict[str, list[float]] = {n: [] for n in names}
    for _ in range(args.rounds + 1 + 2 * args.torchcompile):
        for name, (model, step, batch) in sides.items():
            seconds[name].append(timed_step(step, model, batch, args))
            model.zero_grad(set_to_none=True)
    return {n: statistics.median(s[-args.rounds:]) for n, s in seconds.items()}


def peak_memory(args, name: str, long: bool) -> float:
    """MiB of one step above weights and gradients. Linux (VmHWM) or CUDA."""
    model, step = contestant(name, args.size, args.device, args.precision)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    batch = make_batch(args, name, long)

    def step_once():
        with get_autocast(args.precision, args.device)():
            loss = step(*batch)
        loss.backward()

    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step_once()
        return (torch.cuda.max_memory_allocated() - before) / 2 ** 20
    status = Path("/proc/self/status")
    before = int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1])
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step_once()
    return (int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) - before) / 1024


def memory_of(args, name: str, long: bool) -> float:
    """`peak_memory` in a process of its own, so that no contestant inherits another's heap."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", name, *(["--long"] if long else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def decoder_cost(args) -> list[tuple[int, float]]:
    """(valid tokens, seconds) of the decoder's forward and backward, image projected before, by caption length."""
    model, _ = contestant("MDC", args.size, args.device, args.precision)
    embs = torch.randn(args.batch_size, 49, model.text.blocks[0].cross_kv.in_features, device=args.device)
    rows = []
    for length in (8, 16, 32, 64, 77):
        text = torch.randint(1, 1000, (args.batch_size, 77), device=args.device)
        text[:, 0], text[:, length - 1:] = model.vocab_size - 2, model.vocab_size - 1
        corrupted = model.corrupt(text)
        scored, valid = corrupted.token_weight > 0, valid_tokens(text, model.vocab_size)

        def step(corrupted=corrupted, scored=scored, valid=valid, text=text):
            kv = model.text.project_image(embs)
            return F.cross_entropy(model.token_logits(kv, corrupted.text, valid, scored).float(), text[scored])

        seconds = [timed_step(step, model, (), args) for _ in range(args.rounds + 1)][1:]
        rows.append((int(valid.sum()), statistics.median(seconds)))
    return rows


def share_of_peak(args, seconds: float, long: bool) -> float | None:
    """Achieved share of the chip's bf16 peak, counting the operations that were really run."""
    from torch.utils.flop_counter import FlopCounterMode
    chip = next((k for k in PEAK_BF16 if args.device == "cuda" and k in torch.cuda.get_device_name()), None)
    if chip is None:
        return None
    model, step = contestant("MDC", args.size, args.device, args.precision)
    with FlopCounterMode(display=False) as counter:
        timed_step(step, model, make_batch(args, "MDC", long), args)
    return counter.get_total_flops() / seconds / PEAK_BF16[chip]


def report(args) -> str:
    names = ["MDC", "Algorithm 1", "CLIP", "CoCa"]
    chip = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines = [f"{args.size}, batch {args.batch_size}, {args.precision}{', compiled' * args.torchcompile}, {chip}, "
             f"torch {torch.__version__}, {args.rounds} rounds", "",
             "| captions | valid tokens | against | time / MDC's | memory: MDC's share |", "|---|---|---|---|---|"]
    for long in (False, True):
        contestants = [n for n in names if not (n == "CoCa" and args.size != "ViT-B-32")]
        text = make_batch(args, "MDC", long)[1]
        mean = valid_tokens(text, 49408).sum(1).float().mean()
        seconds = compare_speed(args, contestants, long)
        memory = {n: memory_of(args, n, long) for n in contestants}
        for name in contestants[1:]:
            slower, less = seconds[name] / seconds["MDC"], memory["MDC"] / memory[name]
            lines.append(f"| {'long' if long else 'short'} | {mean:.1f} | {name} | {slower:.2f} | {less:.2f} |")
        share = share_of_peak(args, seconds["MDC"], long)
        if share is not None:
            lines += ["", f"{args.batch_size / seconds['MDC']:.0f} samples/s, {share:.0%} of the bf16 peak", ""]
    cost = decoder_cost(args)
    lines += ["", "| valid tokens of the batch | " + " | ".join(str(n) for n, _ in cost) + " |",
              "|---" * (len(cost) + 1) + "|",
              "| decoder, time / that of the shortest | " + " | ".join(f"{s / cost[0][1]:.2f}" for _, s in cost) + " |"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", required=True, help="text file, one caption a line, or COCO-style json")
    parser.add_argument("--size", default="ViT-B-32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--precision")
    parser.add_argument("--torchcompile", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.batch_size = args.batch_size or (1024 if args.device == "cuda" else 16)
    args.precision = args.precision or ("amp_bf16" if args.device == "cuda" else "fp32")
    if not os.path.exists(args.captions):
        sys.exit(f"error: no captions file {args.captions}")
    print(peak_memory(args, args.memory_of, args.long) if args.memory_of else report(args))


if __name__ == "__main__":
    main()
