"""Evaluate one model on one data set: load both, run the task, write the result file.

`run` replaces clip_benchmark's function of that name (cli.py). Everything else is still done by clip_benchmark.
"""
from argparse import Namespace
from copy import copy
from pathlib import Path

import open_clip
import torch
from clip_benchmark.datasets import builder

from open_clip_mdc.data import fingerprint
from open_clip_mdc.data.files import try_output
from open_clip_mdc.data.outputs import OF_FILES, check_suffix
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.integration.configs import is_captioner
from open_clip_mdc.objectives.config import CaptionCfg

from . import foreign, foreign_datasets, results
from .distributed import everywhere, is_first
from .evaluation_job import Job
from .models import is_encoder, load_model, resolve
from .tasks import TASKS


def run(upstream):
    """Return what replaces clip_benchmark's `run`."""
    return evaluate


# What the data sets of a kind have, and the tasks that fit, the default first.
OF_CAPTIONS = ("zeroshot_retrieval", "captioning", "cloze")
OF_CLASSES = ("zeroshot_classification", "linear_probe", "probe")
TASKS_OF = {"selection": ("wrong captions too", ("image_caption_selection",)),
            "masked": ("a mask for each image", ("segmentation",)), "captions": ("captions", OF_CAPTIONS),
            "classes": ("classes", OF_CLASSES),
            "foreign": ("no masks and no wrong captions to select from", (*OF_CAPTIONS, *OF_CLASSES))}


def choose_task(args: Namespace) -> str:
    kind, task = foreign_datasets.kind_of(args.dataset), args.task
    has, tasks = TASKS_OF[kind]
    if task == "auto":
        task = tasks[0] if kind != "foreign" else builder.get_dataset_default_task(args.dataset.removeprefix("wds/"))
    if task not in tasks:
        raise ValueError(f"{args.dataset} has {has}: give --task {' or '.join(tasks)}")
    return task


def try_outputs(args: Namespace, output: Path, cached: bool) -> None:
    """Raise an error before the long work if the result or the cache cannot be written."""
    if output.suffix.lower() in OF_FILES:
        check_suffix("--output", str(output), (".json",))
    output.parent.mkdir(parents=True, exist_ok=True)
    try_output(output)
    if cached:
        try_output(args.feature_root, folder=True)


def load(job: Job, of_towers: bool) -> Job:
    """Return the job with its model, transform and tokenizer."""
    args = job.args
    alone = args.task == "linear_probe" and is_encoder(args.model)
    if of_towers or alone:
        from . import towers
        model = towers.load(args, job.flags.image_size)
        return job._replace(model=model.trained if alone else model,
                            transform=towers.transform(model, whole=args.task == "segmentation"))
    if job.flags.image_size:
        raise ValueError(f"--image_size is only for probes of --model timm-NAME, not for {args.task} of {args.model}")
    model, transform, tokenizer = load_model(args)
    if args.task in ("captioning", "cloze") or not job.by_cosine:
        model, tokenizer = foreign.as_captioner(model, tokenizer, args.model)
    return job._replace(model=model, transform=transform, tokenizer=tokenizer)


def evaluate(args: Namespace) -> None:
    args, flags = copy(args), args.flags
    args.device = checkpoints.default_device()
    args.verbose = args.verbose and is_first()
    args.dataset = foreign_datasets.known_name(args.dataset)
    args.model, args.pretrained = resolve(args.model, args.pretrained)
    if flags.corruption is not None:  # before the long work
        from .datasets import corruptions
        corruptions.parse(flags.corruption)
    args.task = choose_task(args)
    foreign.check_task(args.model, args.task)
    task, captioner = TASKS[args.task], not args.model.startswith(foreign.HF) and is_captioner(args.model)
    cfg = CaptionCfg(**open_clip.get_model_config(args.model)["caption_cfg"]) if captioner else None
    options = task.options(args, flags, cfg)
    if captioner:
        checkpoints.check_length("--caption_length", options.get("length"), args.pretrained, args.model)
    for_any = (*task.flags, "corruption")
    scored = captioner or "alpha" in options  # by likelihood, or as a captioner of ours can be
    output = results.output_file(args, flags, for_any + task.captioner_flags if scored else for_any, captioner)
    asked = {**{name: getattr(flags, name) for name in for_any}, **options, "datasets": flags.datasets}
    splits = [args.split, *(getattr(args, name) for name in ("train_split", "val_split") if name in task.arguments)]
    job = Job(args, flags, options, output)

    def describe() -> dict:
        data = {split: fingerprint.of_dataset(job.build(split)) for split in splits if split is not None}
        if foreign_datasets.kind_of(args.dataset) == "classes" and len(set(data.values())) < len(data):
            raise ValueError(f"{args.dataset} has the same images for {' and '.join(data)}: give its row a split")
        return results.describe(args, task.arguments, asked, data)

    if args.skip_existing and everywhere(output.exists()) and everywhere(results.is_there(output, describe())):
        if args.verbose:
            print(f"Skip {output}: it exists, with the same settings and data.")
        return

    try_outputs(args, output, cached=args.task == "linear_probe" or task.of_towers or
                scored and args.task == "zeroshot_retrieval")
    if args.verbose:
        print(f"{args.task} of {args.model} {args.pretrained} on {args.dataset}, language {args.language}")
    torch.manual_seed(args.seed)
    job = load(job, task.of_towers)
    batches = job.load_test()
    about = describe()  # before the long work, so that the next run notices files that change during it
    metrics = task.evaluate(job, batches)
    if is_first():
        if items := metrics.pop("items", None):
            results.write_items(output, items)
        # Class ids are the places of one's own folders in the alphabet.
        dump = args.dump_classnames or args.dataset == foreign_datasets.FOLDER
        names = {"classnames": dump and getattr(batches.dataset, "classes", None),
                 "templates": args.dump_templates and getattr(batches.dataset, "templates", None),
                 "of_classes": metrics.pop("of_classes", None)}
        results.write(output, about, metrics, **{name: value for name, value in names.items() if value})
        if args.verbose:
            print(f"Results: {output}")
