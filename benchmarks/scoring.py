"""Speed and memory of caption likelihoods against the plain loop, and what early stopping saves.

    python benchmarks/scoring.py --captions captions_test.json --out scoring.md       2 to 3 minutes on 2 CPU cores
    python benchmarks/scoring.py --captions captions_test.json --scenes scenes --pretrained logs/RUN

Only ratios taken in one run mean anything: the sides take turns. ViT-B/32 with random weights, which score at the speed
of trained ones. The plain loop does what the definitions say: in every step and every draw the image is encoded, all 77
positions are decoded, and log-probabilities over the vocabulary are computed at each. The third table needs a captioner
trained on the scenes (`open_clip_mdc scenes`), as it is about real differences between captions.

Dimensions: C candidates, R captions (rows), L = 77 positions, V vocabulary.
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
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from open_clip_mdc import create_model_and_transforms, get_tokenizer
from open_clip_mdc.checkpoints import load
from open_clip_mdc.estimators import Likelihood
from open_clip_mdc.model import Captioner
from open_clip_mdc.monte_carlo import draw_masks
from open_clip_mdc.scoring import log_likelihood
from open_clip_mdc.tokens import mask_id, target_tokens, valid_tokens

MODEL = "MDC-ViT-B-32"
ROUNDS = 3
PLAIN_DRAWS, DRAWS = 6, 64  # per caption; the ratio is per draw
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
    masked = target_tokens(text, model.vocab_size)
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
        num_tokens = int(target_tokens(row, model.vocab_size).sum())
        masked = torch.zeros(PLAIN_DRAWS, len(row), dtype=torch.bool)
        masked[:, 1:num_tokens + 1] = torch.from_numpy(draw_masks(num_tokens, PLAIN_DRAWS).hidden)
        rows = row.expand(PLAIN_DRAWS, -1)
        log_probs = plain_log_probs(model, image, rows.masked_fill(masked, mask_id(model.vocab_size)), rows)
        of_truth = log_probs.gather(2, rows[..., None]).squeeze(2)
        terms.append((of_truth * masked).sum(1) / masked.sum(1))
    return torch.stack(terms)


def seconds(function: Callable, *args) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function(*args)
    return time.perf_counter() - start, result


def speed(captions: list[str]) -> list[str]:
    """Two images with two candidate captions each, by both estimators: rows of a table."""
    torch.manual_seed(0)
    model = create_model_and_transforms(MODEL)[0].eval()
    text = get_tokenizer(MODEL)(captions[:4]).view(2, 2, -1)
    image = torch.randn(2, 3, *model.visual.image_size)

    def plain(estimator: Callable[..., Tensor]) -> Tensor:
        return torch.stack([estimator(model, *case) for case in zip(image, text, strict=True)])

    def ours(method: str) -> Likelihood:
        return log_likelihood(model, image, text, method, num_samples=DRAWS, return_details=True)

    ours("heuristic")  # warm-up
    times: dict[str, list[float]] = {side: [] for side in ("heuristic", "plain heuristic", "draw", "plain draw")}
    for _ in tqdm(range(ROUNDS), desc="speed"):
        took, expected = seconds(plain, plain_heuristic)
        times["plain heuristic"].append(took / expected.numel())
        took, found = seconds(ours, "heuristic")
        times["heuristic"].append(took / expected.numel())
        torch.testing.assert_close(found.log_likelihood, expected, rtol=1e-4, atol=1e-2)
        took, terms = seconds(plain, plain_draws)
        times["plain draw"].append(took / terms.numel())
        took, found = seconds(ours, "monte_carlo")
        times["draw"].append(took / int(found.draws.sum()))
    rows = []
    for method, unit, side in (("heuristic", "caption", "heuristic"), ("monte_carlo", "draw", "draw")):
        slow, fast = times[f"plain {side}"], times[side]
        ratio = median(a / b for a, b in zip(slow, fast, strict=True))
        rows.append(f"| {method} | {unit} | {1000 * min(slow):.0f} | {1000 * min(fast):.1f} | {ratio:.1f} | "
                    f"{min(slow) / min(fast):.1f} |")
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


def early_stopping(pretrained: str, scenes: Path) -> list[str]:
    """Agreement with all 1,024 draws and draws saved on the scenes' pairs: rows of a table."""
    model, transform, tokenizer = load(pretrained)
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
        mean = draws / (2 * len(pairs))
        rows.append(f"| {task} | {len(pairs)} | {100 * agree / len(pairs):.2f} | {mean:.1f} | {1024 / mean:.1f} |")
    return rows


def table(*rows: str) -> str:
    """A Markdown table of rows, the first one being the head; numbers to the right."""
    columns = rows[0].count("|") - 1
    return "\n".join([rows[0], "| --- |" + " ---: |" * (columns - 1), *rows[1:], ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", required=True, help="COCO captions json, or a text file with a caption per line")
    parser.add_argument("--scenes", type=Path, help="folder of `open_clip_mdc scenes`, for the third table")
    parser.add_argument("--pretrained", help="run folder or checkpoint of a captioner trained on these scenes")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    if (args.scenes is None) != (args.pretrained is None):
        parser.error("--scenes and --pretrained belong together")
    tables = []
    try:
        captions = read_captions(args.captions)
        tables += [f"{MODEL}, float32, {torch.get_num_threads()} CPU threads, two images with two captions each; times "
                   f"are the best of {ROUNDS} rounds.\n",
                   table("| estimator | per | plain loop, ms | ours, ms | median ratio | ratio of the best |",
                         *speed(captions))]
        if Path("/proc/self/clear_refs").exists():  # Linux
            tables.append(table("| estimator | budget, MiB | " +
                                " | ".join(f"peak, {c} candidates, MiB" for c in CANDIDATES) + " |", *memory(captions)))
        if args.scenes:
            tables.append(table("| pairs | number | agreement with 1,024 draws, % | draws per caption | fewer by |",
                                *early_stopping(args.pretrained, args.scenes)))
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
    finally:
        print("\n".join(tables))
    if args.out:
        partial = args.out.with_name(f".{args.out.name}.{os.getpid()}")
        partial.write_text("\n".join(tables))
        os.replace(partial, args.out)


if __name__ == "__main__":
    main()
