"""The captioning task: every image's caption is decoded, saved, and compared with its references (Table 3).

    clip_benchmark eval --model mdc --pretrained RUN --dataset wds/flickr8k --dataset_root DIR --task captioning \\
        --caption_length 10|15|20|auto

Captions are saved before they are scored, beside the result in captions/:

    {"captions": {id: caption}, "tokens": {id: number}, "references": {id: [captions]}, "decoding": {...}, ...}

The same command takes them from there, whatever ailed the scoring, as long as weights, data and settings are the same;
a decoding that was stopped goes on, from the batches that each process notes in a file FILE.partN as it goes.
"""
import glob
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TextIO

import torch
from torch.utils.data import DataLoader

from open_clip_mdc.checkpoints import fingerprint
from open_clip_mdc.data.files import write_json
from open_clip_mdc.model import Captioner
from open_clip_mdc.tokens import caption_lengths, decode_captions

from . import clipscore
from .caption_data import make_loader, read_batch, unique_ids
from .caption_metrics import score_captions
from .distributed import merge, own_batches, rank_and_size
from .features import describe_data
from .flags import options

MDC_LENGTH = 15  # tokens, one of the paper's; a left-to-right model ends its captions by itself
NUM_BEAMS = 6  # the paper's


def decoding_arguments(model: Captioner) -> dict:
    """What the flags ask of `model.generate`.

    Raises:
        ValueError: a flag of the other kind of model.
    """
    default = {"length": "auto", "num_beams": NUM_BEAMS} if model.causal else \
        {"length": MDC_LENGTH, "tokens_per_step": 1}
    flags = {"length": options.caption_length, "num_beams": options.num_beams,
             "tokens_per_step": options.tokens_per_step}
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given.keys() - default.keys():
        kind = "from left to right" if model.causal else "by unmasking"
        raise ValueError(f"--{name} means nothing to this model, which decodes {kind}")
    return default | given


def decode(model: Captioner, dataloader: DataLoader, tokenizer, device: str, amp: bool, arguments: dict,
           key: dict, path: Path) -> dict[str, dict]:
    """Notes every batch beside `path` as it goes, and goes on where another time it was stopped.

    Returns:
        on every process captions, their numbers of tokens (without SOT and EOT) and references, each by image.

    Raises:
        ValueError: the data set is empty or has no captions; the length does not fit the model.
    """
    rows, done = [], read_parts(path, key)
    if done and rank_and_size()[0] == 0:
        logging.warning("going on with a decoding that was stopped: %d batches are done", len(done))
    with open_part(path, key) as part:
        for i, batch in own_batches(dataloader, "captions"):
            ids, images, references = read_batch(i, batch, dataloader)
            row = done.get(i)
            if row is None or row["ids"] != ids:
                with torch.autocast(torch.device(device).type, enabled=amp):
                    text = model.generate(images.to(device), **arguments)
                row = {"batch": i, "ids": ids, "captions": decode_captions(text.cpu(), tokenizer),
                       "tokens": (caption_lengths(text, model.vocab_size) - 2).tolist(), "references": references}
                part.write(json.dumps(row) + "\n")
                part.flush()
            rows.append((i, row))
    rows = merge(rows)
    if not rows:
        raise ValueError("the data set is empty")
    ids = unique_ids([i for row in rows for i in row["ids"]])
    return {name: dict(zip(ids, [x for row in rows for x in row[name]], strict=True))
            for name in ("captions", "tokens", "references")}


# ---- files


def read_captions(path: Path, key: dict) -> dict | None:
    """What was saved for this very key; None if there is no such file."""
    try:
        saved = json.loads(path.read_text())
        return saved if saved["key"] == key and saved["captions"].keys() == saved["references"].keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def open_part(path: Path, key: dict) -> Iterator[TextIO]:
    """This process's notes: a line with the key, then a line per batch."""
    part = path.with_name(f"{path.name}.part{rank_and_size()[0]}")
    head = json.dumps(key) + "\n"
    goes_on = part.exists() and part.read_text(errors="replace").startswith(head)
    with part.open("a" if goes_on else "w") as file:
        file.write("\n" if goes_on else head)  # after a line that was broken off
        try:
            yield file
        finally:
            if not goes_on and file.tell() == len(head):  # there was nothing to note
                part.unlink()


def parts(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.part*"))


def read_parts(path: Path, key: dict) -> dict[int, dict]:
    """Rows of all processes' notes, by batch number; those of another key and broken lines are passed over."""
    rows = {}
    for part in parts(path):
        head, *lines = part.read_text(errors="replace").split("\n")
        if head != json.dumps(key):
            continue
        for line in filter(None, lines):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            rows[row["batch"]] = row
    return rows


# ---- the task


def load_or_decode(model: Captioner, dataloader: DataLoader, tokenizer, device: str, amp: bool, arguments: dict,
                   path: Path, facts: Mapping[str, str]) -> dict:
    """What the file of captions holds; it is made if it is not there or was made of something else.

    Args:
        facts: what the file should say about the run.
    """
    key = {"model": fingerprint(model), "data": describe_data(dataloader), "decoding": arguments,
           "precision": f"autocast on {torch.device(device).type}" if amp else "that of the weights"}
    first = rank_and_size()[0] == 0
    saved = merge([(0, read_captions(path, key))] if first else [])[0]
    if saved is not None:
        logging.warning("captions are those of %s: same weights, data and settings", path)
        return saved
    path.parent.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
    saved = {**decode(model, dataloader, tokenizer, device, amp, arguments, key, path), "decoding": arguments,
             **facts, "key": key}
    if first:
        write_json(path, saved)
        for part in parts(path):
            part.unlink()
    return saved


def evaluate(model: Captioner, dataloader: DataLoader, batch_size: int, device: str, amp: bool = True,
             verbose: bool = False) -> dict:
    """Decodes, saves and scores; on all but the first of several processes the result is not complete.

    Returns:
        the metrics, `NAME_missing` with the reason for one that could not be computed, the mean lengths of captions and
        of references, in words and in the model's tokens, and how the captions were made.
    """
    tokenizer, arguments = options.tokenizer, decoding_arguments(model)
    clip = None
    if options.clipscore_model or options.clipscore_pretrained:  # before the long work, so that it fails early
        clip = clipscore.load(options.clipscore_model, options.clipscore_pretrained, device)
    saved = load_or_decode(model, dataloader, tokenizer, device, amp, arguments, options.captions_file, options.facts)
    captions, references = saved["captions"], saved["references"]
    metrics = {}
    if clip is not None:
        images = make_loader(options.build_dataset(clip.transform), dataloader, batch_size)
        metrics |= clipscore.evaluate(clip, images, captions, references, device)
        metrics["clipscore_model"] = f"{options.clipscore_model} {options.clipscore_pretrained or ''}".strip()
    if rank_and_size()[0] > 0:
        return metrics
    scored = score_captions(captions, references)
    metrics = {
        **scored.scores, **metrics, **{f"{name}_missing": reason for name, reason in scored.missing.items()},
        "mean_length": scored.mean_length, "reference_mean_length": scored.reference_mean_length,
        "mean_tokens": fmean(saved["tokens"].values()),
        "reference_mean_tokens": fmean(len(tokenizer.encode(r)) for texts in references.values() for r in texts),
        "images": len(captions), "word_tokenizer": scored.word_tokenizer,
        **{f"caption_{name}" if name == "length" else name: value for name, value in arguments.items()},
    }
    if verbose:
        print(f"Captions: {options.captions_file}")
        print("\n".join(f"{name}: {value:.3f}" for name, value in metrics.items() if isinstance(value, float)))
    return metrics
