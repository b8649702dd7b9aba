"""List everything that an experiment needs and that is missing: folders, images, programs, models, GPUs, the judge.

Missing data, models or GPUs end the command. If something only leaves a column of a table empty (Java, SPICE's models,
no judge), it is named and the rest is done. Each line comes with the command that fetches it.
"""
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from . import commands
from .commands import Place
from .tables.cells import Cell, Evaluation, Run
from .tables.scales import PROBES, Scale


class Missing(NamedTuple):
    what: str
    fetch: str
    fatal: bool = True


def to_fetch(scale: Scale, path: str, place: Place) -> str | None:
    return next((place.fill(fetch) for begin, fetch in scale.fetch if path.startswith(begin)), None)


def training_data(scale: Scale, names: list[str], runs: Iterable[Run], seeds: list[int], place: Place,
                  ) -> Iterator[Missing]:
    for name in dict.fromkeys(run.data for run in runs
                              if not all(commands.checkpoint(scale, run, seed, place).exists() for seed in seeds)):
        folder = Path(place.fill(scale.data[name].folder))
        if scale.data[name].fetch and not any(folder.glob("*.tar")):
            yield Missing(f"{folder}/00000.tar, ...: {scale.data[name].label}", place.fill(scale.data[name].fetch))
    image = Path(place.fill(scale.image))
    if scale.image and not scale.image.startswith("timm:") and not image.exists():
        yield Missing(f"{image}: the weights of the image encoder", "make ... SCALE=photos-timm-NAME lets timm fetch "
                      "those of its encoder NAME")
    for made in commands.to_make(scale, names, place):
        for part in made.command:
            path = Path(place.fill(part.split("{{")[0]))
            if part.startswith("{data}") and not (path.parent if path.name == "*.tar" else path).exists():
                yield Missing(place.fill(part), to_fetch(scale, part, place))


def test_data(scale: Scale, evaluation: Evaluation, place: Place) -> Iterator[Missing]:
    if not evaluation.root.startswith("{data}"):
        return
    for dataset in evaluation.datasets:
        cleaned = dataset.removeprefix("wds/").replace("/", "-")
        root = Path(place.fill(evaluation.root).format(dataset=cleaned, dataset_cleaned=cleaned))
        if evaluation.task == "image_caption_selection":
            from clip_benchmark_ext.selection_datasets import build_dataset
            try:
                build_dataset(dataset, root)
            except (FileNotFoundError, ValueError) as problem:  # says what to fetch, and from where
                yield Missing(f"{dataset} in {root}", str(problem))
        else:
            splits = ("train", "test") if evaluation.task == "linear_probe" else ("test",)
            if lacking := [f"{root}/{split}/0.tar" for split in splits if not (root / split / "0.tar").exists()]:
                yield Missing(f"{', '.join(lacking)}: {dataset}",
                              to_fetch(scale, evaluation.root, place) or PROBES.format(cleaned, root))


def models(runs: Iterable[Run], evaluations: Iterable[Evaluation], place: Place) -> Iterator[Missing]:
    for run in runs:
        if isinstance(run.start, str):
            import open_clip
            from huggingface_hub import try_to_load_from_cache
            repository = open_clip.get_pretrained_cfg(run.model, run.start)["hf_hub"].rstrip("/")
            files = ("open_clip_pytorch_model.bin", "open_clip_model.safetensors")
            if not any(isinstance(try_to_load_from_cache(repository, file), str) for file in files):
                yield Missing(f"weights {run.start} of {run.model}", f"{place.bin}python -c "
                              f"\"import open_clip; open_clip.create_model('{run.model}', '{run.start}')\"")
    order = {(e.root, d) for e in evaluations for d in e.datasets if d.endswith("_order")}
    frozen = [Path(place.fill(root), f"{d.partition('/')[2]}_perturbations.json") for root, d in order]
    if not all(path.exists() for path in frozen) and not all(map(find_spec, ("spacy", "nltk", "en_core_web_sm"))):
        yield Missing("nltk and spaCy's en_core_web_sm, which make the negatives of ARO Order",
                      f"{place.bin}python -m pip install spacy nltk && "
                      f"{place.bin}python -m spacy download en_core_web_sm")


def programs(names: list[str], place: Place) -> Iterator[Missing]:
    if place.gpus:
        import torch
        if torch.cuda.device_count() < place.gpus:
            yield Missing(f"{place.gpus} GPUs: PyTorch sees {torch.cuda.device_count()}", "make ... GPUS=N")
    if "table3" in names:
        from clip_benchmark_ext.metrics.caption_metrics import SPICE_MODELS
        if shutil.which("java") is None:
            yield Missing("Java: METEOR and SPICE stay empty", "apt-get install default-jre-headless", fatal=False)
        if not all(path.exists() for path in SPICE_MODELS):
            yield Missing("SPICE's language models: SPICE stays empty",
                          f"{place.bin}python -m pycocoevalcap.spice.get_stanford_models", fatal=False)
        if not (url := os.environ.get("JUDGE_URL")):
            yield Missing("a judge: the column LLM stays empty", f"vllm serve {commands.JUDGE}; then "
                          "make ... JUDGE_URL=http://HOST:8000/v1", fatal=False)
        else:
            import requests
            try:
                requests.get(f"{url}/models", timeout=10)
            except requests.RequestException as problem:
                yield Missing(f"the judge at JUDGE_URL={url} ({type(problem).__name__})",
                              "start it, or give another URL")


def missing(scale: Scale, names: list[str], cells: list[Cell], seeds: list[int], place: Place) -> list[Missing]:
    runs = {run: None for cell in cells for run in (cell.run.start, cell.run) if isinstance(run, Run)}
    evaluations = [evaluation for evaluation, _ in commands.evaluations(cells)]
    tested = (need for evaluation in evaluations for need in test_data(scale, evaluation, place))
    return list(dict.fromkeys([*training_data(scale, names, runs, seeds, place), *tested,
                               *models(runs, evaluations, place), *programs(names, place)]))


def check(scale: Scale, names: list[str], cells: list[Cell], seeds: list[int], place: Place) -> None:
    found = missing(scale, names, cells, seeds, place)
    for need in sorted(found, key=lambda need: not need.fatal):
        print(f"{'missing' if need.fatal else 'not there'}: {need.what}\n    {need.fetch}", file=sys.stderr)
    if fatal := sum(need.fatal for need in found):
        raise ValueError(f"{fatal} things are missing, listed above: nothing was run")
