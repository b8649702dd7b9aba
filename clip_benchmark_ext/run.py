"""`clip_benchmark eval` of one model on one data set: load, build the data, do the task, write the result file.

`run` stands in for clip_benchmark's function of that name (patches.py), for every model. What is no
captioner and none of our data sets is loaded, read and, where the task is not ours, evaluated by upstream's functions.
"""
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial, wraps
from pathlib import Path
from typing import NamedTuple

import open_clip
import torch
from clip_benchmark import models as upstream_models
from clip_benchmark.datasets import builder
from clip_benchmark.metrics import zeroshot_retrieval
from open_clip.coca_model import CoCa
from torch.utils.data import DataLoader, get_worker_info
from torchvision.transforms import Compose
from webdataset import split_by_worker

from open_clip_mdc.data.files import try_output
from open_clip_mdc.data.outputs import OF_FILES, check_suffix
from open_clip_mdc.data.shards import check_shard, regroup
from open_clip_mdc.data.text import read_names
from open_clip_mdc.errors import close_names
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.integration.configs import is_captioner
from open_clip_mdc.objectives.base import CaptionCfg
from open_clip_mdc.objectives.registry import OBJECTIVES

from . import contents, other_sets, results
from . import selection_datasets as datasets
from .coca import CoCaCaptioner
from .datasets import caption_data, corruptions
from .distributed import everywhere, rank_and_size
from .features import default_feature
from .flags import DECODING, Flags, decoding_options, scoring_options
from .tasks import captioning, linear_probe, selection, zeroshot

NOBODYS_PRETRAINED = "laion400m_e32"  # upstream's default


def whole_shards(shards: Iterable[dict]) -> Iterator[dict]:
    """A stage of a webdataset: the shards as they are read, local ones once `check_shard` has found no damage."""
    for shard in shards:
        if os.path.exists(shard["url"]):
            check_shard(Path(shard["url"]))
        yield shard


def own_samples(samples: Iterable[dict], batch_size: int) -> Iterator[dict]:
    """A stage of a webdataset: of W workers each takes every W-th batch, before it is decoded.

    webdataset deals out shards, and batches come as its workers make them: which rows meet in a batch, and in which
    order they come, would depend on the number of workers.
    """
    worker = get_worker_info()
    first, step = (worker.id, worker.num_workers) if worker else (0, 1)
    return (sample for number, sample in enumerate(samples) if number // batch_size % step == first)


class Job(NamedTuple):
    """One model and one data set. `args` are upstream's, with the names, the task and the device resolved."""

    args: Namespace
    flags: Flags
    options: dict  # what our flags ask of the model, the defaults filled in
    output: Path
    model: torch.nn.Module = None
    transform: Callable = None
    tokenizer: Callable = None

    @property
    def common(self) -> dict:
        return {"device": self.args.device, "amp": self.args.amp}

    def build(self, split: str, transform: Callable | None = None):
        """The data set; images by the model's transform unless another is given.

        Raises:
            FileNotFoundError, ValueError: see `datasets.build_dataset`; no webdataset where one should be.
        """
        args = self.args
        root = args.dataset_root.format(dataset=args.dataset.removeprefix("wds/"),
                                        dataset_cleaned=args.dataset.removeprefix("wds/").replace("/", "-"))
        transform = transform or self.transform  # None before the model is loaded
        if datasets.find_row(args.dataset):
            return datasets.build_dataset(args.dataset, root, transform, perturbations=self.flags.perturbations)
        try:
            dataset = other_sets.build(
                args.dataset, root, transform, split, annotation_file=args.annotation_file, language=args.language,
                task=args.task, custom_template_file=args.custom_template_file, wds_cache_dir=args.wds_cache_dir,
                custom_classname_file=args.custom_classname_file)
        except FileNotFoundError as problem:
            if not args.dataset.startswith("wds/"):
                raise
            raise FileNotFoundError(
                f"no webdataset in {root}: it should hold {split}/nshards.txt and {split}/0.tar, ...; --dataset_root "
                "takes such a folder or https://huggingface.co/datasets/clip-benchmark/wds_NAME/tree/main") from problem
        except UnicodeDecodeError as problem:
            raise ValueError(f"a text in {root} is no UTF-8 ({problem}): save it as UTF-8") from problem
        except AssertionError as problem:  # upstream's, e.g. of class names that are not there
            raise ValueError(f"{args.dataset} in {root} is not fit for {args.task}: {problem}") from problem
        if args.dataset.startswith("wds/"):
            for field, name in (("classes", "classnames.txt"), ("templates", "zeroshot_classification_templates.txt")):
                if getattr(dataset, field) and os.path.isfile(path := os.path.join(root, name)):
                    setattr(dataset, field, read_names(path))
            place = dataset.pipeline.index(split_by_worker)
            dataset.pipeline[place] = whole_shards
            dataset.pipeline[place + 2:place + 2] = [  # before upstream decodes
                regroup, partial(own_samples, batch_size=args.batch_size), caption_data.decode_images]
            dataset.pipeline[place + 5].args[0].partial = True  # its decoder: what is decoded is passed on
        return caption_data.with_keys(dataset, transform) if args.task == "captioning" else dataset

    def load(self, split: str, transform: Callable | None = None) -> DataLoader:
        """Batches of `build`, in the order of the data set whatever the number of workers; images are clean."""
        dataset, args = self.build(split, transform), self.args
        if args.dataset.startswith("wds/"):
            # Each worker reads all shards: of those on the web one is enough.
            workers = min(args.num_workers, 1) if "://" in args.dataset_root else args.num_workers
            return DataLoader(dataset.batched(args.batch_size), batch_size=None, num_workers=workers)
        collate = getattr(dataset, "collate_fn", None) or builder.get_dataset_collate_fn(args.dataset)
        return DataLoader(dataset, args.batch_size, num_workers=args.num_workers, collate_fn=collate)

    def load_test(self, transform: Callable | None = None) -> DataLoader:
        """The batches that the task is about, corrupted if that is asked for."""
        transform = transform or self.transform
        if self.flags.corruption is not None:
            transform = Compose([corruptions.parse(self.flags.corruption), transform])
        return self.load(self.args.split, transform)


# ---- tasks: a Job and the batches of its split -> metrics


def select_captions(job: Job, batches: DataLoader) -> dict:
    """See `selection.evaluate`."""
    options = dict(job.options)
    return selection.evaluate(job.model, batches, job.tokenizer, **job.common, alpha=options.pop("alpha", 1.0),
                              options=options)


def classify(job: Job, batches: DataLoader) -> dict:
    """See `zeroshot.evaluate`. Raises ValueError for a data set without class names or templates."""
    args, dataset = job.args, batches.dataset
    other_sets.check_names(dataset)
    if not getattr(dataset, "classes", None) or not getattr(dataset, "templates", None):
        raise ValueError(f"{args.dataset} has no class names or no templates, which zero-shot classification needs")
    return zeroshot.evaluate(job.model, batches, job.tokenizer, dataset.classes, dataset.templates, **job.common,
                             verbose=args.verbose, options=job.options, save_clf=args.save_clf,
                             load_clfs=args.load_clfs)


def probe(job: Job, batches: DataLoader) -> dict:
    """See `linear_probe.evaluate`; `batches` are the test split, the others are loaded here."""
    args, flags = job.args, job.flags
    splits = {"train": job.load(args.train_split)}
    if args.val_split is not None:
        splits["val"] = job.load(args.val_split)
    splits["test"] = batches
    other_sets.check_classes({split: loader.dataset for split, loader in splits.items()})
    return linear_probe.evaluate(
        job.model, splits, flags.feature or default_feature(job.model), args.feature_root,
        args.fewshot_k, args.batch_size, args.fewshot_lr, args.fewshot_epochs, args.seed, **job.common,
        normalize=args.normalize, val_proportion=args.val_proportion, verbose=args.verbose,
        save_probe=flags.save_probe, note=f"{args.model} {args.pretrained} {args.dataset}")


def retrieve(job: Job, batches: DataLoader) -> dict:
    """Upstream's recalls. Raises ValueError for a model without text embeddings."""
    if not hasattr(job.model, "encode_text"):
        raise ValueError(f"{job.args.model} embeds no texts, which retrieval compares: give another --task")
    return zeroshot_retrieval.evaluate(job.model, batches, job.tokenizer, recall_k_list=job.args.recall_k,
                                       **job.common)


def caption(job: Job, batches: DataLoader) -> dict:
    """See `captioning.evaluate`. Raises ValueError for a model that writes no captions."""
    args, flags = job.args, job.flags
    model = CoCaCaptioner(job.model) if isinstance(job.model, CoCa) else job.model
    if not hasattr(model, "generate"):
        raise ValueError(f"{args.model} writes no captions: give another --task")
    # In a folder of their own: `clip_benchmark build *.json` takes every file for a result.
    file = Path(results.file_name(flags.save_captions, args)) if flags.save_captions else \
        job.output.parent / "captions" / job.output.name
    about = {name: getattr(args, name) for name in ("dataset", "split", "model", "pretrained")}
    return captioning.evaluate(
        model, batches, job.tokenizer, file, about, job.options, job.load_test, partial(job.load, args.split),
        **job.common,
        clipscore=(flags.clipscore_model, flags.clipscore_pretrained), phrase=flags.phrase,
        train_captions=flags.train_captions, verbose=args.verbose)


def scoring(args: Namespace, flags: Flags, cfg: CaptionCfg | None) -> dict:
    """Arguments of `log_likelihood`; none for a model that has none."""
    return {} if cfg is None else scoring_options(flags, OBJECTIVES[cfg.objective].scorers, (cfg.t_min, cfg.t_max))


def debiased_scoring(args: Namespace, flags: Flags, cfg: CaptionCfg | None) -> dict:
    """`scoring`, and alpha of the debiased scores."""
    return {} if cfg is None else scoring(args, flags, cfg) | {"alpha": flags.alpha}


def decoding(args: Namespace, flags: Flags, cfg: CaptionCfg | None) -> dict:
    """Arguments of `generate`; what is no captioner of ours, CoCa, is autoregressive.

    Raises:
        ValueError: --clip without a captioner of ours; or as `decoding_options`.
    """
    if cfg is None and flags.clip:
        raise ValueError(f"--clip helps captioners, such as MDC- and ARC-; {args.model} is none")
    return decoding_options(flags, cfg, args.seed, args.batch_size)


class Task(NamedTuple):
    """How a task is done, and which arguments and flags decide its numbers."""

    evaluate: Callable[[Job, DataLoader], dict]
    arguments: tuple[str, ...] = ()  # of upstream's, those that decide this task's numbers
    flags: tuple[str, ...] = ()  # of ours, for any model
    captioner_flags: tuple[str, ...] = ()  # of ours, for captioners
    # Upstream's arguments, our flags and the model's caption_cfg -> arguments of the method that the task calls.
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


# ---- the model


def resolve(model: str, pretrained: str) -> tuple[str, str]:
    """The architecture and the checkpoint file (or schema id) that --model and --pretrained mean.

    Raises:
        FileNotFoundError, ValueError: see `checkpoints.find`; ValueError too if the checkpoint is no such captioner.
    """
    alias = model.lower() if model.lower() in OBJECTIVES else None
    if not alias and not is_captioner(model):
        is_run = (Path(pretrained) / "checkpoints").is_dir()
        return model, checkpoints.find(pretrained, model).weights if is_run else pretrained
    if pretrained == NOBODYS_PRETRAINED:
        raise ValueError(f"--model {model} needs --pretrained: a checkpoint, a run folder, local-dir:DIR or hf-hub:ID")
    name, weights, _ = checkpoints.find(pretrained, None if alias else model)
    if not is_captioner(name):
        raise ValueError(f"{pretrained} is a checkpoint of {name}, which is no captioner; give --model {name}")
    objective = checkpoints.objective(name)
    if alias not in (None, objective):
        raise ValueError(f"{pretrained} is a checkpoint of {name}, no {alias.upper()}; give --model {name}")
    return name, weights or name


def load_model(args: Namespace) -> tuple:
    """Model, transform and tokenizer: of a checkpoint file as it was trained, of any other as upstream loads it.

    Upstream knows nothing of a run's --force-image-size and other flags of images: it would resize the positional
    embedding to the config's image size, in silence.

    Raises:
        FileNotFoundError, ValueError: there is no such model or checkpoint.
    """
    if args.skip_load:
        raise ValueError("--skip_load finds no features here, which are kept by the model's content: leave it out")
    if is_captioner(args.model):
        return checkpoints.load(args.pretrained, None if ":" in args.model else args.model, device=args.device,
                                captioner=True)
    named = args.model_type == "open_clip"
    if named and ":" not in args.model and open_clip.get_model_config(args.model) is None:
        close = close_names(args.model, open_clip.list_models())
        raise ValueError(f"--model {args.model} is no model known here{close}")
    if named and ":" in args.model:
        model, transform, tokenizer = checkpoints.load(args.model, device=args.device, cache_dir=args.model_cache_dir)
    elif named and os.path.exists(args.pretrained):
        model, transform, tokenizer = checkpoints.load(args.pretrained, args.model, device=args.device)
    else:
        model, transform, tokenizer = upstream_models.load_clip(
            args.model_type, args.model, args.pretrained, args.model_cache_dir, device=args.device)
    if "nllb-clip" in args.model:
        from clip_benchmark.models.nllb_clip import set_language
        set_language(tokenizer, args.language)
    return model.eval(), transform, tokenizer


# ---- the run


def run(upstream):
    """`clip_benchmark.cli.run`."""
    @wraps(upstream)
    def run_one(args):
        return evaluate(args, getattr(args, "flags", Flags()))
    return run_one


def evaluate(args: Namespace, flags: Flags) -> int:
    """Writes one result file, unless it is there and may be kept; returns 0.

    Raises:
        ValueError: the task does not fit the data set; or as `resolve`, `load_model`, `Job.build` and the task.
    """
    args = copy(args)
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.verbose = args.verbose and rank_and_size()[0] == 0
    args.dataset = other_sets.known_name(args.dataset)
    args.model, args.pretrained = resolve(args.model, args.pretrained)
    selects = datasets.find_row(args.dataset) is not None
    if flags.corruption is not None:
        corruptions.parse(flags.corruption)  # before the long work
    if args.task == "auto":
        args.task = "image_caption_selection" if selects else builder.get_dataset_default_task(
            args.dataset.removeprefix("wds/"))
    if selects != (args.task == "image_caption_selection"):
        raise ValueError(f"{args.dataset} has wrong captions too: give --task image_caption_selection" if selects else
                         f"{args.dataset} has no wrong captions to select from: give another --task")
    task, captioner = TASKS[args.task], is_captioner(args.model)
    cfg = CaptionCfg(**open_clip.get_model_config(args.model)["caption_cfg"]) if captioner else None
    options = task.options(args, flags, cfg)
    if captioner and isinstance(tokens := options.get("length"), int):
        most = checkpoints.longest_caption(args.pretrained, args.model)
        if tokens > most:
            raise ValueError(f"--caption_length {tokens} is more than this model's context holds: give 1 to {most} "
                             "tokens")
    for_any = (*task.flags, "corruption")
    output = results.output_file(args, flags, for_any + task.captioner_flags if captioner else for_any, captioner)
    asked = {**{name: getattr(flags, name) for name in for_any}, **options}
    splits = [args.split, *(getattr(args, name) for name in ("train_split", "val_split") if name in task.arguments)]
    job = Job(args, flags, options, output)

    def describe() -> dict:
        data = {split: contents.fingerprint(job.build(split)) for split in splits if split is not None}
        return results.describe(args, task.arguments, asked, data)

    if args.skip_existing and everywhere(output.exists()) and everywhere(results.is_there(output, describe())):
        if args.verbose:
            print(f"Skip {output}: it is there, of the same settings and data.")
        return 0

    if output.suffix.lower() in OF_FILES:
        check_suffix("--output", str(output), (".json",))
    output.parent.mkdir(parents=True, exist_ok=True)
    try_output(output)
    if args.task == "linear_probe":
        try_output(args.feature_root, folder=True)
    if args.verbose:
        print(f"{args.task} of {args.model} {args.pretrained} on {args.dataset}, language {args.language}")
    torch.manual_seed(args.seed)
    job = Job(args, flags, options, output, *load_model(args))
    batches = job.load_test()
    about = describe()  # before the long work, that what changes meanwhile is noticed by the next run
    metrics = task.evaluate(job, batches)
    if rank_and_size()[0] == 0:
        if items := metrics.pop("items", None):
            results.write_items(output, items)
        names = {"classnames": args.dump_classnames and getattr(batches.dataset, "classes", None),
                 "templates": args.dump_templates and getattr(batches.dataset, "templates", None)}
        results.write(output, about, metrics, **{name: value for name, value in names.items() if value})
        if args.verbose:
            print(f"Results: {output}")
    return 0
