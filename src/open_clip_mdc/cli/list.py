"""List the names that the commands take: models, objectives, tasks and data sets.

    open_clip_mdc list                      # everything
    open_clip_mdc list models datasets

Models are for --model of open_clip_train. Objectives are for --model of clip_benchmark eval, with --pretrained RUN.
Tasks and data sets are for its --task and --dataset.
"""
import argparse

from clip_benchmark_ext.datasets.known import KINDS
from clip_benchmark_ext.tasks import TASKS

from ..integration import configs, plugins
from ..objectives import OBJECTIVES
from .shared import docstring


def models() -> list[tuple[str, str]]:
    """Return a row for each prefix and suffix of BASE, which is any model of OpenCLIP or timm-ENCODER."""
    rows = [(pattern.replace("*", "BASE"), cfg["objective"]) for pattern, cfg in configs.ROWS.items()]
    return [*rows, *((name, "a small image tower for BASE") for name in configs.architectures())]


def objectives() -> list[tuple[str, str]]:
    plugins.load_installed()
    order = {"any": "decodes in any order", "causal": "decodes from left to right", "blocks": "decodes block by block"}
    return [(name, f"{order[row.order]} (--scorer {' or '.join(row.scorers) or 'has none'})")
            for name, row in OBJECTIVES.items()]


def tasks() -> list[tuple[str, str]]:
    return [(name, docstring(f"clip_benchmark_ext.tasks{task.place.partition(':')[0]}").splitlines()[0])
            for name, task in TASKS.items()]


def datasets() -> list[tuple[str, str]]:
    rows = [(name, f"{kind}: {', '.join(row.get('subsets', ())) or 'one set'}")
            for kind in ("selection", "captions", "classes", "masked") for name, row in KINDS[kind].items()]
    return [*rows, ("folder", "your images in class folders: DIR/train/CLASS/*.jpg, DIR/test/CLASS/*.jpg"),
            ("wds/NAME", "webdataset shards with classes or captions"),
            ("NAME", "any data set of clip_benchmark, such as cifar10 or imagenet1k")]


def run(args: argparse.Namespace) -> None:
    for kind in args.kinds:
        rows = {"models": models, "objectives": objectives, "tasks": tasks, "datasets": datasets}[kind]()
        width = max(len(name) for name, _ in rows)
        print("\n".join([f"{kind}:", *(f"  {name:{width}}  {about}" for name, about in rows)]))
