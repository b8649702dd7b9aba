"""Captioning: decode a caption for every image, save it, and compare it with its references (Table 3).

Captions are saved before they are scored, in captions/ beside the result:

    {"captions": {id: caption}, "filenames": {id: that in KEY.json, if any}, "tokens": {id: number},
     "steps": {id: number}, "references": {id: [captions]}, "samples": {id: [captions]} with --samples but not --select,
     ...}

The same command reuses them if weights, data and settings are the same. An interrupted run resumes from the batches
that each process wrote to its journal FILE.partN.
"""
import json
import logging
from collections.abc import Mapping
from functools import partial
from itertools import repeat
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from open_clip_mdc.data.files import try_output, write_json
from open_clip_mdc.data.fingerprint import fingerprint, shards_of
from open_clip_mdc.data.image_ids import check_image_ids, coco_results, image_id, read_image_ids
from open_clip_mdc.decoding.clip_guidance import Clip, Guide
from open_clip_mdc.decoding.generate import generate as decode_images
from open_clip_mdc.decoding.options import Sampling, guides, in_files, needs_null_image
from open_clip_mdc.decoding.sampling import Decoded
from open_clip_mdc.integration import clip as clip_models
from open_clip_mdc.integration.decoding_flags import OF_CLIP
from open_clip_mdc.models.foreign.base import ForeignCaptioner
from open_clip_mdc.text.special_tokens import caption_lengths, decode_captions

from ..datasets.caption_data import read_batch, unique_ids
from ..distributed import is_first, merge, own_batches
from ..evaluation_job import Job
from ..features import describe_data
from ..metrics import clipscore as clipscore_module
from ..metrics import diversity, hallucination, repeats
from ..metrics.caption_metrics import score_captions
from ..results import file_name, precision
from ..resume import journals, resumed
from .selection import null_image


def generate(model: torch.nn.Module, images: Tensor, number: int, options: Mapping, blind: Tensor | None,
             guide: Guide | None = None, guidance_kl: list[Tensor] | None = None) -> Decoded:
    """Decode the captions of a batch. Random draws depend only on the seed and the batch's number."""
    if options.get("clip_rerank"):
        options = {**options, "samples": options["clip_rerank"], "rerank": True}
    options = {name: value for name, value in options.items() if name not in ("batch_size", *OF_CLIP)}
    sampling = {name: options.pop(name) for name in Sampling._fields if name in options}
    if "seed" in options:
        state = int(np.random.SeedSequence([options.pop("seed"), number]).generate_state(1)[0])
        generator = torch.Generator(images.device).manual_seed(state)
        options["sampling"] = Sampling(**sampling, generator=generator)
    given = {"blind": blind, "guide": guide, "guidance_kl": guidance_kl}
    caption = partial(decode_images, model) if isinstance(model, ForeignCaptioner) else model.generate
    return caption(images, return_trace=True, **options,
                   **{name: value for name, value in given.items() if value is not None})


def decode(job: Job, batches: DataLoader, key: dict, file: Path, clip: Clip | None) -> dict[str, dict]:
    """Return captions, tokens, steps, references and so on by image, on every process.

    Each process writes its batches to a journal beside `file`. Batches in any earlier journal are not decoded again.
    """
    model, tokenizer, options, device = job.model, job.tokenizer, job.options, job.args.device
    clip_images = clip and job.load_test(clip.transform)
    guided = guides(options)
    with job.autocast():
        blind = null_image(model, batches, device) if needs_null_image(options, model) else None
    seen_by_clip = own_batches(clip_images, "images for CLIP") if clip else repeat((0, None))
    both = ((i, (read_batch(i, batch, batches), batch, other)) for (i, batch), (_, other) in zip(
        own_batches(batches, "captions"), seen_by_clip, strict=clip is not None))

    def caption(i: int, one: tuple) -> dict:
        (ids, images, references), batch, other = one
        with job.autocast():
            guide = clip and Guide(clip, read_batch(i, other, clip_images)[1].to(device), tokenizer,
                                   options.get("clip_scale", 0.0))
            kl = [] if guided else None
            text, step, _ = generate(model, images.to(device), i, options, blind, guide, kl)
        count = len(text) // len(ids)  # consecutive captions per image
        texts = decode_captions(text.cpu(), tokenizer)
        return {"ids": ids, "names": list(batch[3]) if len(batch) > 3 else [""] * len(ids),
                "captions": texts[::count],
                "tokens": (caption_lengths(text, tokenizer.vocab_size)[::count] - 2).tolist(),
                "steps": (step.amax(1)[::count] + 1).tolist(), "references": references,
                **({"samples": [texts[j:j + count] for j in range(0, len(texts), count)]} if count > 1 else {}),
                **({"clip_texts": guide.texts} if guide else {}),
                **({"guidance_kl": [torch.cat(kl).mean().item()] * len(ids)} if guided else {})}

    rows = resumed(both, file, key, caption, fits=lambda row, one: row["ids"] == one[0][0])
    if not rows:
        raise ValueError("the data set is empty")
    ids = unique_ids([i for row in rows for i in row["ids"]])
    names = [name for row in rows for name in row.get("names", [""] * len(row["ids"]))]
    return {"filenames": {i: name for i, name in zip(ids, names, strict=True) if name}} | {
            name: dict(zip(ids, [x for row in rows for x in row[name]], strict=True))
            for name in rows[0] if name not in ("batch", "ids", "names")}


def read_captions(file: Path, key: dict) -> dict | None:
    try:
        saved = json.loads(file.read_text())
        whole = saved["captions"].keys() == saved["steps"].keys() == saved["references"].keys()
        return saved if saved["key"] == key and whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def load_or_decode(job: Job, batches: DataLoader, file: Path, clip: Clip | None) -> dict:
    args, first = job.args, is_first()
    key = {"model": fingerprint(getattr(job.model, "model", job.model)), "data": describe_data(batches),
           "decoding": in_files(job.options), "precision": precision(args),
           **({"clip": fingerprint(clip.model)} if clip else {})}
    saved = merge([(0, read_captions(file, key))] if first else [])[0]
    if saved:
        logging.warning("captions are taken from %s, which has the same weights, data and settings", file)
        return saved
    file.parent.mkdir(parents=True, exist_ok=True)  # fail before the long work
    facts = {name: getattr(args, name) for name in ("dataset", "split", "model", "pretrained")}
    saved = {**decode(job, batches, key, file, clip), "decoding": job.options, **facts, "key": key}
    if first:
        write_json(file, saved)
        for part in journals(file):
            part.unlink()
    return saved


def coco_ids(batches: DataLoader, dataset: str) -> list[int]:
    """Return the image_ids of COCO's results format, in order. Raises ValueError if the images have none."""
    data = batches.dataset
    if shards := shards_of(data):
        if any("://" in shard for shard in shards):
            raise ValueError("--save_coco_results needs shards on this machine to read image_ids: download them first")
        return list(read_image_ids(map(Path, shards)).values())
    ids = getattr(data, "ids", None) or [case.key for case in getattr(data, "cases", ())]
    if not ids:
        raise ValueError(f"--save_coco_results: the images of {dataset} have no image_id, unlike those of "
                         f"mscoco_captions and some webdatasets")
    return list(check_image_ids((str(i), image_id({"image_id": i}, str(i))) for i in ids).values())


def load_clips(options: Mapping, clipscore: tuple[str | None, str | None], device: str) -> tuple:
    scoring = clipscore_module.load(*clipscore, device) if any(clipscore) else None
    clip = clip_models.load(*clip_models.parse(options["clip"]), device) if "clip" in options else None
    weights = [model.model.state_dict() for model in (scoring, clip) if model]
    if len(weights) == 2 and weights[0].keys() == weights[1].keys() and all(
            torch.equal(weights[0][name], weights[1][name]) for name in weights[0]):
        raise ValueError("CLIPScore by the model of --clip would be biased, as the captions were chosen by it: give "
                         "another --clipscore_model and --clipscore_pretrained")
    return clip, scoring


def measure(saved: Mapping, phrase: str | None, train_captions: set[str] | None,
            of_clip: Mapping[str, list[float]]) -> dict:
    captions, references = saved["captions"], saved["references"]
    scored = score_captions(captions, references)
    found, values, weights = hallucination.metrics(captions, references, phrase)
    flawed, of_flaws = repeats.metrics(captions)
    diverse, of_images = diversity.metrics(saved["samples"], train_captions) if "samples" in saved else ({}, {})
    return {
        **scored.scores, **found, **flawed, **diverse, **{name: fmean(column) for name, column in of_clip.items()},
        **{f"{name}_missing": reason for name, reason in scored.missing.items()},
        "mean_length": scored.mean_length, "reference_mean_length": scored.reference_mean_length,
        "images": len(captions), "word_tokenizer": scored.word_tokenizer,
        "items": {"images": list(captions), "weights": weights,
                  "values": {**scored.of_images, **values, **of_flaws, **of_images, **of_clip}}}


def by_group(saved: Mapping, groups: list[str]) -> dict:
    """Return the metrics of each group of images alone, such as NoCaps's domains, as GROUP/METRIC."""
    metrics = {}
    for group in sorted(set(groups)):
        own = [i for i, of_image in zip(saved["captions"], groups, strict=True) if of_image == group]
        captions, references = ({i: saved[name][i] for i in own} for name in ("captions", "references"))
        scored = score_captions(captions, references)
        metrics |= {f"{group}/{name}": value for name, value in (*scored.scores.items(), ("images", len(own)))}
        metrics |= {f"{group}/{name}_missing": reason for name, reason in scored.missing.items()}
    return metrics


def run(job: Job, batches: DataLoader) -> dict:
    """Decode, save and score captions.

    Returns the metrics, with `NAME_missing` for the reason why one could not be computed, mean lengths, the share of
    captions with as many tokens as one of their references (length_match), and the decoding options. Only the first of
    several processes returns them.
    """
    args, flags, options = job.args, job.flags, job.options
    clipscore = flags.clipscore_model, flags.clipscore_pretrained
    clip, scoring = load_clips(options, clipscore, args.device)  # fail before the long work
    known = diversity.read_train_captions(flags.train_captions) if flags.train_captions else None
    # In a folder of their own, as `clip_benchmark build *.json` takes every file for a result.
    file = Path(file_name(flags.save_captions, args)) if flags.save_captions else \
        Path(job.output.parent, "captions", job.output.name)
    coco = Path(file_name(flags.save_coco_results, args)) if flags.save_coco_results else None
    if coco:
        try_output(coco)
        ids = coco_ids(batches, args.dataset)
    saved = load_or_decode(job, batches, file, clip)
    if coco and is_first():
        write_json(coco, coco_results(saved["captions"], dict(zip(saved["captions"], ids, strict=True))))
    references, of_clip = saved["references"], {}
    if scoring:
        of_clip = clipscore_module.evaluate(scoring, job.load(args.split, scoring.transform), saved["captions"],
                                            references, args.device)
    if not is_first():
        return {}
    counts = {i: [len(job.tokenizer.encode(text)) for text in texts] for i, texts in references.items()}
    groups = [case.group for case in getattr(batches.dataset, "cases", ())]
    metrics = {
        **measure(saved, flags.phrase, known, of_clip), **(by_group(saved, groups) if len(set(groups)) > 1 else {}),
        "mean_tokens": fmean(saved["tokens"].values()), "mean_steps": fmean(saved["steps"].values()),
        "reference_mean_tokens": fmean(count for of_image in counts.values() for count in of_image),
        "length_match": fmean(saved["tokens"][i] in of_image for i, of_image in counts.items()),
        **({"clipscore_model": " ".join(filter(None, clipscore))} if scoring else {}),
        **({"guidance_kl": fmean(saved["guidance_kl"].values())} if "guidance_kl" in saved else {}),
        **({"clip_texts_per_caption": fmean(saved["clip_texts"].values())} if clip else {}),
        **{f"caption_{name}" if name == "length" else name: value for name, value in options.items()},
    }
    if args.verbose:
        print(f"Captions: {file}")
        print("\n".join(f"{name}: {value:.3f}" for name, value in metrics.items() if isinstance(value, float)))
    return metrics
