"""Scores image-text pairs by a captioner's likelihood: a CSV or JSONL file with a line per picture and caption.

    open_clip_mdc score --pretrained RUN --images cat.jpg photos/ --captions captions.txt --out scores.csv

Every caption of the file (one a line) is scored for every picture. Columns: image, caption, score = log p(c | i),
blind = log p(c), debiased = score - alpha * blind, and tokens: the per-token log-likelihoods in reading order, with the
step at which the heuristic revealed each. The blind score sees the mean of all pictures given.
"""
import argparse
import csv
import json
from pathlib import Path

import torch
from tqdm import tqdm

from ..checkpoints import load
from ..data.files import new_file
from ..data.pictures import find_pictures, open_picture
from ..model import Captioner
from ..scoring import log_likelihood, mean_image
from ..tokens import decode_captions, target_tokens

BATCH = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pretrained", required=True, help="checkpoint, run folder, local-dir: or hf-hub: id")
    parser.add_argument("--model", help="architecture, for a checkpoint outside a run folder")
    parser.add_argument("--images", required=True, nargs="+", help="picture files, folders or patterns")
    parser.add_argument("--captions", required=True, help="text file, one caption a line")
    parser.add_argument("--out", default="scores.csv", help="a .csv or .jsonl file")
    parser.add_argument("--alpha", type=float, default=1.0, help="debiased = score - alpha * blind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def score_pairs(model: Captioner, images: torch.Tensor, captions: list[str], tokenizer, blind: torch.Tensor,
                alpha: float) -> list[list[dict]]:
    """Columns for each of B images [B, 3, H, W] and each of C captions."""
    tokens = tokenizer(captions).to(images.device)
    scores = log_likelihood(model, images, tokens.expand(len(images), -1, -1), return_details=True)
    prior = log_likelihood(model, None, tokens[None], blind=blind)[0].tolist()
    scored = target_tokens(tokens, model.vocab_size)
    rows = []
    for i in range(len(images)):
        rows.append([])
        for c, caption in enumerate(captions):
            places = scored[c].nonzero().flatten().tolist()
            likelihoods = scores.token_log_likelihood[i, c].tolist()
            order = scores.order[i, c].tolist() if scores.order is not None else range(-1, len(likelihoods))
            words = decode_captions(tokens[c, places][:, None], tokenizer)
            score = float(scores.log_likelihood[i, c])
            rows[-1].append({
                "caption": caption, "score": score, "blind": prior[c], "debiased": score - alpha * prior[c],
                "tokens": [{"token": word or "<end>", "log_likelihood": likelihoods[p], "step": order[p]}
                           for p, word in zip(places, words, strict=True)]})
    return rows


def run(args: argparse.Namespace) -> None:
    """Writes --out in one go at the end."""
    out = Path(args.out)
    if out.suffix not in (".csv", ".jsonl"):
        raise ValueError(f"--out {out} should end in .csv or .jsonl")
    captions = [line.strip() for line in Path(args.captions).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not captions:
        raise ValueError(f"{args.captions} has no caption")
    pictures = find_pictures(args.images)
    model, transform, tokenizer = load(args.pretrained, args.model, args.device)
    if not isinstance(model, Captioner):
        raise ValueError(f"{args.pretrained} is no captioner")

    def batches(description: str):
        for i in tqdm(range(0, len(pictures), BATCH), desc=description, unit="batch"):
            batch = pictures[i:i + BATCH]
            yield batch, torch.stack([transform(open_picture(p)) for p in batch]).to(args.device)

    blind = mean_image(model, (images for _, images in batches("mean image")))
    with new_file(out) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["image", "caption", "score", "blind", "debiased", "tokens"])
        if out.suffix == ".csv":
            writer.writeheader()
        for paths, images in batches("scores"):
            scored = score_pairs(model, images, captions, tokenizer, blind, args.alpha)
            for path, rows in zip(paths, scored, strict=True):
                for row in rows:
                    row = {"image": str(path), **row}
                    if out.suffix == ".csv":
                        writer.writerow({**row, "tokens": json.dumps(row["tokens"])})
                    else:
                        file.write(json.dumps(row) + "\n")
    print(f"{len(pictures)} pictures x {len(captions)} captions: {out}")
