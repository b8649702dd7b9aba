"""Speed and memory of caption likelihoods, as ratios against the plain loop, both sides in one run, interleaved.

    python benchmarks/scoring.py --captions captions_test.json --out scoring.md
    python benchmarks/scoring.py --captions captions_test.json --scenes scenes --checkpoint logs/RUN/checkpoints/epoch_8.pt

The plain loop is what the definitions say: image encoded, 77 positions decoded and logits taken over the vocabulary at
each of them, in every step and every draw. Speed does not depend on weights or pixels, so they are random. With a model
trained on the scenes (`open_clip_mdc scenes`) a third table tells what early stopping saves on their swapped captions.
"""
import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from open_clip_mdc import create_model_and_transforms, get_tokenizer
from open_clip_mdc.model import Captioner
from open_clip_mdc.scoring import draw_masks, log_likelihood
from open_clip_mdc.tokens import mask_id, scored_tokens, valid_tokens

MODEL, SCENES_MODEL = "MDC-ViT-B-32", "MDC-ViT-Ti-8"
REPEATS = 3
PLAIN_DRAWS, DRAWS = 8, 128  # per caption; the ratio is per draw
BUDGET_MIB, CANDIDATES = 256, (2, 200)


def read_captions(path: str) -> list[str]:
    """Captions of a COCO captions json, or the lines of a text file."""
    text = Path(path).read_text(encoding="utf-8")
    if path.endswith(".json"):
        return [row["caption"] for row in json.loads(text)["annotations"]]
    return [line for line in text.splitlines() if line.strip()]


def plain_log_probs(model: Captioner, image: Tensor, noisy: Tensor, text: Tensor) -> Tensor:
    """[R, L, V] for noisy captions [R, L] of one image [3, height, width]."""
    valid = valid_tokens(text, model.vocab_size)
    return model.logits(image.expand(len(text), -1, -1, -1), noisy, valid).log_softmax(-1)


@torch.inference_mode()
def plain_heuristic(model: Captioner, image: Tensor, text: Tensor) -> Tensor:
    """The heuristic as the paper tells it: [C] for one image and captions [C, 77]."""
    masked = scored_tokens(text, model.vocab_size)
    noisy = text.masked_fill(masked, mask_id(model.vocab_size))
    score = torch.zeros(len(text))
    while masked.any():
        log_probs = plain_log_probs(model, image, noisy, text)
        place = log_probs.amax(-1).masked_fill(~masked, -torch.inf).argmax(1)
        for row in masked.any(1).nonzero().squeeze(1).tolist():
            i = place[row]
            score[row] += log_probs[row, i, text[row, i]]
            noisy[row, i] = text[row, i]
            masked[row, i] = False
    return score


@torch.inference_mode()
def plain_draws(model: Captioner, image: Tensor, text: Tensor) -> Tensor:
    """One term of Eq. 8 for PLAIN_DRAWS masks of each caption: [C, PLAIN_DRAWS]."""
    terms = []
    for row in text:
        num_tokens = int(scored_tokens(row, model.vocab_size).sum())
        masked = torch.zeros(PLAIN_DRAWS, len(row), dtype=torch.bool)
        masked[:, 1:num_tokens + 1] = torch.from_numpy(draw_masks(num_tokens, PLAIN_DRAWS).hidden)
        rows = row.expand(PLAIN_DRAWS, -1)
        log_probs = plain_log_probs(model, image, rows.masked_fill(masked, mask_id(model.vocab_size)), rows)
        of_truth = log_probs.gather(2, rows[..., None]).squeeze(2)
        terms.append((of_truth * masked).sum(1) / masked.sum(1))
    return torch.stack(terms)


def seconds(function: Callable, *args) -> tuple[float, Tensor]:
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def speed(captions: list[str]) -> list[str]:
    """Two images with two candidate captions each, by both estimators: rows of a table."""
    torch.manual_seed(0)
    model = create_model_and_transforms(MODEL)[0].eval()
    text = get_tokenizer(MODEL)(captions[:4]).view(2, 2, -1)
    image = torch.randn(2, 3, *model.visual.image_size)

    def ours(method: str):
        return log_likelihood(model, image, text, method, num_samples=DRAWS, return_details=True)

    seconds(ours, "heuristic")  # warm-up
    times: dict[str, list[float]] = {key: [] for key in ("heuristic", "plain heuristic", "draw", "plain draw")}
    for _ in tqdm(range(REPEATS), desc="speed"):
        took, expected = seconds(lambda: torch.stack([plain_heuristic(model, *pair) for pair in zip(image, text)]))
        times["plain heuristic"].append(took / text[..., 0].numel())
        took, found = seconds(ours, "heuristic")
        times["heuristic"].append(took / text[..., 0].numel())
        torch.testing.assert_close(found.log_likelihood, expected, rtol=1e-4, atol=1e-2)
        took, terms = seconds(lambda: torch.stack([plain_draws(model, *pair) for pair in zip(image, text)]))
        times["plain draw"].append(took / terms.numel())
        took, found = seconds(ours, "monte_carlo")
        times["draw"].append(took / int(found.draws.sum()))
    rows = []
    for name, unit in (("heuristic", "caption"), ("draw", "draw")):
        plain, fast = times[f"plain {name}"], times[name]
        ratios = [a / b for a, b in zip(plain, fast, strict=True)]
        rows.append(f"| {'monte_carlo' if name == 'draw' else name} | {unit} | {1000 * min(plain):.0f} | "
                    f"{1000 * min(fast):.1f} | {median(ratios):.1f} | {min(plain) / min(fast):.1f} |")
    return rows


def resident_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def peak_growth(method: str, candidates: int, captions: list[str]) -> float:
    """MiB by which the resident memory rises while `candidates` captions are scored; runs in a process of its own."""
    model = create_model_and_transforms(MODEL)[0].eval()
    text = get_tokenizer(MODEL)(captions)[None]
    image = torch.randn(1, 3, *model.visual.image_size)
    log_likelihood(model, image, text[:, :1], method, num_samples=1)  # thread pools and the like
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident_mib("VmRSS")
    log_likelihood(model, image, text[:, :candidates], method, num_samples=8, memory_mib=BUDGET_MIB)
    return resident_mib("VmHWM") - before


def memory(captions: list[str]) -> list[str]:
    """Peak memory with few and with many candidates: rows of a table."""
    short = sorted(set(captions), key=lambda caption: (len(caption.split()), caption))[:max(CANDIDATES)]
    if len(short) < max(CANDIDATES):
        raise ValueError(f"--captions has {len(short)} different captions; the memory table needs {max(CANDIDATES)}")
    rows = []
    for method in tqdm(("heuristic", "monte_carlo"), desc="memory"):
        found = []
        for candidates in CANDIDATES:
            with get_context("spawn").Pool(1) as pool:
                found.append(pool.apply(peak_growth, (method, candidates, short)))
        rows.append(f"| {method} | {BUDGET_MIB} | " + " | ".join(f"{mib:.0f}" for mib in found) + " |")
    return rows


def early_stopping(checkpoint: str, scenes: Path) -> list[str]:
    """Agreement with all 1,024 draws and draws saved on the scenes' pairs: rows of a table."""
    model, _, transform = create_model_and_transforms(SCENES_MODEL, pretrained=checkpoint)
    tokenizer = get_tokenizer(SCENES_MODEL)
    model.eval()
    rows = []
    for task in ("swap_att", "swap_obj", "replace_rel"):
        pairs = list(json.loads((scenes / "sugarcrepe" / f"{task}.json").read_text()).values())
        agree = draws = 0
        for pair in tqdm(pairs, desc=task):
            with Image.open(scenes / "sugarcrepe" / "images" / pair["filename"]) as picture:
                image = transform(picture)[None]
            text = tokenizer([pair["caption"], pair["negative_caption"]])[None]
            full = log_likelihood(model, image, text, "monte_carlo")
            early = log_likelihood(model, image, text, "monte_carlo", stop_confidence=0.999, return_details=True)
            agree += int(full.argmax() == early.log_likelihood.argmax())
            draws += int(early.draws.sum())
        mean = draws / 2 / len(pairs)
        rows.append(f"| {task} | {len(pairs)} | {100 * agree / len(pairs):.2f} | {mean:.1f} | {1024 / mean:.1f} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", required=True, help="COCO captions json, or a text file with a caption per line")
    parser.add_argument("--scenes", type=Path, help="folder of `open_clip_mdc scenes`, for early stopping")
    parser.add_argument("--checkpoint", help=f"{SCENES_MODEL} trained on these scenes")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    if (args.scenes is None) != (args.checkpoint is None):
        parser.error("--scenes and --checkpoint belong together")
    try:
        captions = read_captions(args.captions)
        lines = [f"{MODEL}, float32, {torch.get_num_threads()} CPU threads, two candidates per image, milliseconds: best "
                 f"of {REPEATS}", "",
                 "| estimator | per | plain loop, ms | ours, ms | ratio, median | ratio of the best |",
                 "| --- | --- | ---: | ---: | ---: | ---: |", *speed(captions)]
        if Path("/proc/self/clear_refs").exists():
            lines += ["", "| estimator | budget, MiB | " + " | ".join(f"peak of {c} candidates" for c in CANDIDATES) + " |",
                      "| --- | ---: | ---: | ---: |", *memory(captions)]
        if args.scenes:
            lines += ["", "| task | pairs | agreement with 1,024 draws, % | draws | fewer by |",
                      "| --- | ---: | ---: | ---: | ---: |", *early_stopping(args.checkpoint, args.scenes)]
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
    table = "\n".join(lines) + "\n"
    print(table)
    if args.out:
        partial = args.out.with_name(f".{args.out.name}.{os.getpid()}")
        partial.write_text(table)
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
