"""The tasks of `clip_benchmark eval`: a Job and the batches of its split -> metrics.

A task's code is imported when it is asked for: a linear probe needs none that writes or scores captions.
"""
from argparse import Namespace
from collections.abc import Callable
from typing import NamedTuple

from torch.utils.data import DataLoader

from open_clip_mdc.objectives.base import CaptionCfg
from open_clip_mdc.objectives.registry import OBJECTIVES

from .. import other_sets
from ..flags import DECODING, Flags, decoding_options, scoring_options
from ..job import Job


def select_captions(job: Job, batches: DataLoader) -> dict:
    from . import selection
    options = dict(job.options)
    return selection.evaluate(job.model, batches, job.tokenizer, **job.common, alpha=options.pop("alpha", 1.0),
                              options=options)


def classify(job: Job, batches: DataLoader) -> dict:
    from . import zeroshot
    return zeroshot.evaluate(job, batches)


def probe(job: Job, batches: DataLoader) -> dict:
    from . import linear_probe
    args, flags = job.args, job.flags
    splits = {"train": job.load(args.train_split)}
    if args.val_split is not None:
        splits["val"] = job.load(args.val_split)
    splits["test"] = batches
    other_sets.check_classes({split: loader.dataset for split, loader in splits.items()})
    return linear_probe.evaluate(
        job.model, splits, flags.feature, args.feature_root,
        args.fewshot_k, args.batch_size, args.fewshot_lr, args.fewshot_epochs, args.seed, **job.common,
        normalize=args.normalize, val_proportion=args.val_proportion, verbose=args.verbose,
        save_probe=flags.save_probe, note=f"{args.model} {args.pretrained} {args.dataset}")


def retrieve(job: Job, batches: DataLoader) -> dict:
    from clip_benchmark.metrics import zeroshot_retrieval
    if not hasattr(job.model, "encode_text"):
        raise ValueError(f"{job.args.model} embeds no texts, which retrieval compares: give another --task")
    return zeroshot_retrieval.evaluate(job.model, batches, job.tokenizer, recall_k_list=job.args.recall_k,
                                       **job.common)


def caption(job: Job, batches: DataLoader) -> dict:
    from . import captioning
    return captioning.evaluate(job, batches)


def scoring(args: Namespace, flags: Flags, cfg: CaptionCfg | None) -> dict:
    return {} if cfg is None else scoring_options(flags, OBJECTIVES[cfg.objective].scorers, (cfg.t_min, cfg.t_max))


def debiased_scoring(args: Namespace, flags: Flags, cfg: CaptionCfg | None) -> dict:
    return {} if cfg is None else scoring(args, flags, cfg) | {"alpha": flags.alpha}


def decoding(args: Namespace, flags: Flags, cfg: CaptionCfg | None) -> dict:
    if cfg is None and flags.clip:
        raise ValueError(f"--clip helps captioners, such as MDC- and ARC-; {args.model} is none")
    return decoding_options(flags, cfg, args.seed, args.batch_size)


class Task(NamedTuple):
    """A task's function, and the arguments and flags that decide its numbers."""

    evaluate: Callable[[Job, DataLoader], dict]
    arguments: tuple[str, ...] = ()  # of clip_benchmark's, those that decide this task's numbers
    flags: tuple[str, ...] = ()  # of ours, for any model
    captioner_flags: tuple[str, ...] = ()  # of ours, for captioners
    # clip_benchmark's arguments, our flags and the model's caption_cfg (None of a model that is no captioner of ours)
    # -> arguments of the method that the task calls.
    options: Callable[[Namespace, Flags, CaptionCfg | None], dict] = lambda *_: {}


SCORER = ("scorer", "num_samples", "stop_confidence", "trained_interval")
TASKS = {
    "image_caption_selection": Task(
        select_captions, (), ("perturbations",), (*SCORER, "alpha"), debiased_scoring),
    "zeroshot_classification": Task(
        classify, ("custom_classname_file", "custom_template_file", "load_clfs"), (), SCORER, scoring),
    "zeroshot_retrieval": Task(retrieve, ("annotation_file", "recall_k")),
    "linear_probe": Task(probe, ("train_split", "val_split", "val_proportion", "fewshot_k", "fewshot_lr",
                                 "fewshot_epochs", "batch_size", "seed", "normalize"), ("feature",)),
    "captioning": Task(
        caption, ("annotation_file",),
        (*DECODING, "phrase", "train_captions", "clipscore_model", "clipscore_pretrained"), (), decoding),
}
