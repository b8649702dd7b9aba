"""What stands in for clip_benchmark's functions while `register(BENCHMARK)` is in force (open_clip_mdc.integration).

Each hook takes the upstream object and falls through to it for what is no captioner and none of our data sets.
"""
import os
import tempfile
from copy import copy
from functools import partial, wraps
from pathlib import Path

from open_clip_mdc import checkpoints
from open_clip_mdc.integration import is_captioner
from open_clip_mdc.model import Captioner
from open_clip_mdc.objective import OBJECTIVES

from . import caption_data, captioning, datasets, likelihood_tasks, linear_probe
from .distributed import everywhere, rank_and_size
from .features import default_feature
from .flags import options

ALIASES = tuple(OBJECTIVES)  # --model mdc|arc|cappa takes the architecture from the checkpoint
DEFAULT_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"


def resolve(model: str, pretrained: str) -> tuple[str, str]:
    """The architecture and the checkpoint file (or schema id) that --model and --pretrained mean.

    Raises:
        FileNotFoundError, ValueError: see `checkpoints.find`; ValueError too if the checkpoint is no such captioner.
    """
    alias = model.lower() if model.lower() in ALIASES else None
    name, weights, _ = checkpoints.find(pretrained, None if alias else model)
    if not is_captioner(name):
        raise ValueError(f"{pretrained} is a checkpoint of {name}, which is no captioner; give --model {name}")
    objective = checkpoints.objective(name)
    if alias not in (None, objective):
        raise ValueError(f"{pretrained} is a checkpoint of {name}, no {alias.upper()}; give --model {name}")
    return name, weights or name


def run(upstream):
    """`clip_benchmark.cli.run`: finds the architecture, names result files apart, writes them on one process only."""
    @wraps(upstream)
    def run_one(args):
        args = copy(args)
        captioner = args.model.lower() in ALIASES or is_captioner(args.model)
        if captioner:
            args.model, args.pretrained = resolve(args.model, args.pretrained)
            if args.output == DEFAULT_OUTPUT:  # two runs' epoch_32.pt, or two scorers, must not overwrite each other
                args.output = args.output.replace("{pretrained}", "{pretrained_full_path}").replace(
                    ".json", f"{settings_suffix(args.task)}.json")
        options.captioning = captioner and args.task == "captioning"
        options.val_proportion = None
        if args.dataset.startswith("wds/") and args.val_proportion is not None:
            options.val_proportion, args.val_proportion = args.val_proportion, None  # upstream cannot split a stream
        if rank_and_size()[0] > 0:
            args.verbose = False
            with tempfile.TemporaryDirectory() as folder:
                return upstream_unless_skipped(upstream, args, os.path.join(folder, "result.json"))
        return upstream_unless_skipped(upstream, args, None)
    return run_one


def settings_suffix(task: str) -> str:
    """The flags, as they were given, of which each value has a result of its own."""
    flags = {"length": options.caption_length, "step": options.tokens_per_step, "beams": options.num_beams}
    if task != "captioning":
        flags = {"": options.scorer}
    return "".join(f"_{name}{value}" for name, value in flags.items() if value is not None)


def upstream_unless_skipped(upstream, args, output: str | None):
    """All processes skip an existing result, or none does. `output` replaces the result file where it is not None."""
    slug = args.pretrained if not os.path.isfile(args.pretrained) else os.path.basename(args.pretrained)
    names = dict(
        model=args.model, pretrained=slug, pretrained_full_path=args.pretrained.replace("/", "_"), task=args.task,
        dataset=args.dataset.removeprefix("wds/").replace("/", "_"), language=args.language)
    path = args.output.format(**names)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    # In a folder of their own: `clip_benchmark build *.json` takes every file for a result.
    options.captions_file = Path(options.save_captions.format(**names)) if options.save_captions else \
        Path(path).parent / "captions" / Path(path).name
    options.facts = {name: getattr(args, name) for name in ("dataset", "split", "model", "pretrained")}
    if args.skip_existing and not everywhere(os.path.exists(path)):
        args.skip_existing = False
    if output is not None and not args.skip_existing:
        args.output = output
    return upstream(args)


def load_clip(upstream):
    """`clip_benchmark.cli.load_clip`: captioners are made as they were trained."""
    @wraps(upstream)
    def load(model_type, model_name, pretrained, cache_dir=None, device="cpu"):
        if not is_captioner(model_name):
            return upstream(model_type=model_type, model_name=model_name, pretrained=pretrained, cache_dir=cache_dir,
                            device=device)
        loaded = checkpoints.load(pretrained, None if ":" in model_name else model_name, device=device)
        options.tokenizer = loaded[-1]  # upstream's captioning passes none on
        return loaded
    return load


def build_dataset(upstream):
    """`clip_benchmark.cli.build_dataset`: SugarCrepe, ARO, Winoground and VALSE from local folders; keys of samples."""
    @wraps(upstream)
    def build(dataset_name, root="root", transform=None, **kwargs):
        selection = datasets.is_selection_dataset(dataset_name)
        if options.captioning:
            if selection:
                raise ValueError(f"{dataset_name} has wrong captions too: give --task image_caption_selection")
            # CLIPScore builds it again, with its model's transform.
            options.build_dataset = partial(caption_data.build_dataset, upstream, dataset_name, root, kwargs)
            return options.build_dataset(transform)
        if not selection:
            return upstream(dataset_name=dataset_name, root=root, transform=transform, **kwargs)
        return datasets.build_dataset(dataset_name, root, transform, perturbations=options.perturbations)
    return build


def get_dataset_collate_fn(upstream):
    """`clip_benchmark.cli.get_dataset_collate_fn`."""
    @wraps(upstream)
    def collate_fn(dataset_name):
        ours = datasets.is_selection_dataset(dataset_name)
        return datasets.SelectionDataset.collate_fn if ours else upstream(dataset_name)
    return collate_fn


def get_dataset_default_task(upstream):
    """`clip_benchmark.cli.get_dataset_default_task`."""
    @wraps(upstream)
    def task(dataset):
        return "image_caption_selection" if datasets.is_selection_dataset(dataset) else upstream(dataset)
    return task


def image_caption_selection(upstream):
    """`clip_benchmark.metrics.image_caption_selection.evaluate`: captioners score by likelihood."""
    @wraps(upstream)
    def evaluate(model, dataloader, tokenizer, device, amp=True):
        if not isinstance(model, Captioner):
            return upstream(model, dataloader, tokenizer, device, amp=amp)
        return likelihood_tasks.evaluate_selection(model, dataloader, tokenizer, device, amp)
    return evaluate


def zeroshot_classification(upstream):
    """`clip_benchmark.metrics.zeroshot_classification.evaluate`: captioners score by likelihood."""
    @wraps(upstream)
    def evaluate(model, *args, **kwargs):
        score = likelihood_tasks.evaluate_zeroshot if isinstance(model, Captioner) else upstream
        return score(model, *args, **kwargs)
    return evaluate


def captioning_evaluate(upstream):
    """`clip_benchmark.metrics.captioning.evaluate`: saves captions before it scores them."""
    @wraps(upstream)
    def evaluate(model, dataloader, batch_size, device, transform, num_workers=None, amp=True, verbose=False):
        if not isinstance(model, Captioner):
            return upstream(model=model, dataloader=dataloader, batch_size=batch_size, device=device,
                            transform=transform, num_workers=num_workers, amp=amp, verbose=verbose)
        return captioning.evaluate(model, dataloader, batch_size, device, amp, verbose)
    return evaluate


def linear_probe_evaluate(upstream):
    """`clip_benchmark.metrics.linear_probe.evaluate`: any device; GAP for captioners, [CLS] for CLIP (Sec. 4.2)."""
    @wraps(upstream)
    def evaluate(model, *args, **kwargs):
        feature = options.feature or default_feature(model)
        metrics = linear_probe.evaluate(model, *args, **kwargs, feature=feature, save_probe=options.save_probe,
                                        val_proportion=options.val_proportion)
        return {**metrics, "feature": feature}
    return evaluate
