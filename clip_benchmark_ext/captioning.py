"""The captioning task: every image's caption is decoded, saved, and compared with its references (Table 3).

    clip_benchmark eval --model mdc --pretrained RUN --dataset wds/flickr8k --dataset_root DIR --task captioning \\
        --caption_length 10|15|20|auto|sample

Captions are saved before they are scored, beside the result in captions/:

    {"captions": {id: caption}, "tokens": {id: number}, "steps": {id: number}, "references": {id: [captions]}, ...}

The same command takes them from there, whatever ailed the scoring, as long as weights, data and settings are the same;
a decoding that was stopped resumes, from the batches that each process notes in its journal FILE.partN.
"""
import glob
import json
import logging
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.checkpoints import fingerprint
from open_clip_mdc.data.files import write_json
from open_clip_mdc.data.journal import Journal, Rows
from open_clip_mdc.interface import Decoded
from open_clip_mdc.sampling import Sampling
from open_clip_mdc.tokens import caption_lengths, decode_captions

from . import clipscore as clip_model
from .caption_data import read_batch, unique_ids
from .caption_metrics import score_captions
from .distributed import merge, own_batches, rank_and_size
from .features import describe_data
from .results import precision
from .selection import blind_image


def generate(model: torch.nn.Module, images: Tensor, number: int, options: Mapping, blind: Tensor | None) -> Decoded:
    """The captions of a batch; what is drawn depends on the seed and the batch's number alone.

    Args:
        options: see `flags.decoding_options`.
    """
    options = {name: value for name, value in options.items() if name != "batch_size"}
    sampling = {name: options.pop(name) for name in Sampling._fields if name in options}
    if "seed" in options:
        seed = options.pop("seed")
        state = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        generator = torch.Generator(images.device).manual_seed(state)
        options["sampling"] = Sampling(**sampling, generator=generator)
    return model.generate(images, return_trace=True, **options, **({} if blind is None else {"blind": blind}))


def needs_blind_image(model: torch.nn.Module, options: Mapping) -> bool:
    """Whether guidance leans away from no image, and the model was not trained with zeros for it."""
    return options.get("guidance_scale", 1) != 1 and options["guidance_weak"] == "blind" \
        and not model.caption_cfg.condition_zeros


def decode(model: torch.nn.Module, dataloader: DataLoader, tokenizer: Callable, device: str, amp: bool, options: dict,
           key: dict, file: Path) -> dict[str, dict]:
    """Notes every batch in this process's journal beside `file`; what all processes noted before is not done again.

    Returns:
        on every process captions, their numbers of tokens (without SOT and EOT) and of steps, and references, each by
        image.

    Raises:
        ValueError: the data set is empty or has no captions; the length does not fit the model.
    """
    done = ChainMap(*(Rows(part, key, "batch") for part in journals(file)))
    if done and rank_and_size()[0] == 0:
        logging.warning("a decoding that was stopped resumes: %d batches are done", len(done))
    rows, autocast = [], partial(torch.autocast, torch.device(device).type, enabled=amp)
    with autocast():
        blind = blind_image(model, dataloader, device) if needs_blind_image(model, options) else None
    with Journal(file.with_name(f"{file.name}.part{rank_and_size()[0]}"), key, "batch") as journal:
        for i, batch in own_batches(dataloader, "captions"):
            ids, images, references = read_batch(i, batch, dataloader)
            row = done.get(i)
            if row is None or row["ids"] != ids:
                with autocast():
                    text, step, _ = generate(model, images.to(device), i, options, blind)
                row = {"batch": i, "ids": ids, "captions": decode_captions(text.cpu(), tokenizer),
                       "tokens": (caption_lengths(text, tokenizer.vocab_size) - 2).tolist(),
                       "steps": (step.amax(1) + 1).tolist(), "references": references}
                journal.append(row)
            rows.append((i, row))
    rows = merge(rows)
    if not rows:
        raise ValueError("the data set is empty")
    ids = unique_ids([i for row in rows for i in row["ids"]])
    return {name: dict(zip(ids, [x for row in rows for x in row[name]], strict=True))
            for name in ("captions", "tokens", "steps", "references")}


def journals(file: Path) -> list[Path]:
    """Those of all processes."""
    return sorted(file.parent.glob(f"{glob.escape(file.name)}.part*"))


def read_captions(file: Path, key: dict) -> dict | None:
    """What was saved for this very key; None if there is no such file."""
    try:
        saved = json.loads(file.read_text())
        return saved if saved["key"] == key and saved["captions"].keys() == saved["steps"].keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def load_or_decode(model: torch.nn.Module, dataloader: DataLoader, tokenizer: Callable, device: str, amp: bool,
                   options: dict, file: Path, facts: Mapping[str, str]) -> dict:
    """What the file of captions holds; it is made if it is not there or was made of something else.

    Args:
        facts: what the file should say about the run.
    """
    key = {"model": fingerprint(getattr(model, "model", model)), "data": describe_data(dataloader), "decoding": options,
           "precision": precision(device, amp)}
    first = rank_and_size()[0] == 0
    saved = merge([(0, read_captions(file, key))] if first else [])[0]
    if saved is not None:
        logging.warning("captions are those of %s: same weights, data and settings", file)
        return saved
    file.parent.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
    saved = {**decode(model, dataloader, tokenizer, device, amp, options, key, file), "decoding": options, **facts,
             "key": key}
    if first:
        write_json(file, saved)
        for part in journals(file):
            part.unlink()
    return saved


def evaluate(model: torch.nn.Module, dataloader: DataLoader, tokenizer: Callable, file: Path,
             facts: Mapping[str, str], options: dict, load: Callable[[Callable], DataLoader], device: str,
             amp: bool = True, clipscore: tuple[str | None, str | None] = (None, None), verbose: bool = False) -> dict:
    """Decodes, saves and scores; on all but the first of several processes the result is not complete.

    Args:
        file: of the captions.
        facts: what it should say about the run.
        options: see `flags.decoding_options`.
        load: the same batches with another transform.
        clipscore: model and weights for CLIPScore.

    Returns:
        the metrics, `NAME_missing` with the reason for one that could not be computed; the shares of captions that are
        one of their references (exact_match), and that have as many tokens as one (length_match); the mean lengths of
        captions and of references, in words and in the model's tokens; and how the captions were made.
    """
    clip = clip_model.load(*clipscore, device) if any(clipscore) else None  # before the long work: fails early
    saved = load_or_decode(model, dataloader, tokenizer, device, amp, options, file, facts)
    captions, references = saved["captions"], saved["references"]
    metrics = {}
    if clip is not None:
        metrics |= clip_model.evaluate(clip, load(clip.transform), captions, references, device)
        metrics["clipscore_model"] = " ".join(filter(None, clipscore))
    if rank_and_size()[0] > 0:
        return metrics
    scored = score_captions(captions, references)
    counts = {i: [len(tokenizer.encode(text)) for text in texts] for i, texts in references.items()}
    metrics = {
        **scored.scores, **metrics, **{f"{name}_missing": reason for name, reason in scored.missing.items()},
        "mean_length": scored.mean_length, "reference_mean_length": scored.reference_mean_length,
        "mean_tokens": fmean(saved["tokens"].values()), "mean_steps": fmean(saved["steps"].values()),
        "reference_mean_tokens": fmean(count for of_image in counts.values() for count in of_image),
        "exact_match": fmean(captions[i] in texts for i, texts in references.items()),
        "length_match": fmean(saved["tokens"][i] in of_image for i, of_image in counts.items()),
        "images": len(captions), "word_tokenizer": scored.word_tokenizer,
        "items": {"images": list(captions), "values": scored.of_images},
        **{f"caption_{name}" if name == "length" else name: value for name, value in options.items()},
    }
    if verbose:
        print(f"Captions: {file}")
        print("\n".join(f"{name}: {value:.3f}" for name, value in metrics.items() if isinstance(value, float)))
    return metrics
