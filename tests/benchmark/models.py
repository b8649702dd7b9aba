"""Models and data of the benchmark's tests: tiny CLIPs, data sets."""
import json
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import open_clip
import pytest
import torch
from conftest import picture, png, read_json, words, write_json, write_tar
from open_clip.model import CLIP

from clip_benchmark_ext import cli, run
from clip_benchmark_ext.evaluation_job import Job
from clip_benchmark_ext.flags import Flags

CLIP_CONFIG = {"embed_dim": 16, "vision_cfg": {"image_size": 48, "layers": 1, "width": 32, "patch_size": 16,
                                               "head_width": 16},
               "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}}


def evaluate(*flags, name: str = "result") -> dict:
    """Return the result of `clip_benchmark eval`, in this folder. Of a flag that is given twice the last one counts."""
    cli.main(words("eval", "--num_workers 0 --output", f"{name}.json", *flags))
    return read_json(f"{name}.json")


def flags_of(runs: Path, dataset: str, root: Path, *more, alias: str = "mdc") -> tuple:
    """The flags of a model among `runs` on a data set."""
    return "--model", alias, "--pretrained", runs / alias, "--dataset", dataset, "--dataset_root", root, *more


def other_weights(runs: Path, file: Path) -> None:
    """Write the captioner `mdc` with another weight."""
    checkpoint = torch.load(runs / "mdc/checkpoints/epoch_1.pt")
    checkpoint["state_dict"]["text.output.weight"][0] += 1
    torch.save(checkpoint, file)


class Loaded(Exception):
    """The model was about to be loaded."""


def skipped(*flags) -> bool:
    """Return whether `clip_benchmark eval` keeps the result that is there, and loads no model."""
    with patch.object(run, "load_model", side_effect=Loaded), suppress(Loaded):
        cli.main(words("eval", "--num_workers 0 --quiet --output result.json --skip_existing", *flags))
        return True
    return False


def tiny_clip(**text_cfg) -> CLIP:
    torch.manual_seed(0)
    model = CLIP(**CLIP_CONFIG | {"text_cfg": CLIP_CONFIG["text_cfg"] | text_cfg})
    torch.nn.init.normal_(model.visual.proj)
    torch.nn.init.normal_(model.text_projection)
    return model.eval()


def known(folder: Path, name: str, config: dict) -> tuple[str, str]:
    """Make OpenCLIP know a model: what --model takes, and --pretrained once its weights are there."""
    write_json(folder / f"{name}.json", config)
    open_clip.add_model_config(folder / f"{name}.json")
    torch.manual_seed(0)
    return name, str(folder / f"{name}.pt")


def save_clip(folder: Path, name: str = "tiny-clip-vit", **text_cfg) -> tuple[str, str]:
    """A CLIP model that OpenCLIP knows: what --model and --pretrained take."""
    name, weights = known(folder, name, CLIP_CONFIG | {"text_cfg": CLIP_CONFIG["text_cfg"] | text_cfg})
    torch.save(tiny_clip(**text_cfg).state_dict(), weights)
    return name, weights


def built(dataset: str, root: Path, task: str, transform=None, **more):
    """Return a test set as `clip_benchmark eval` builds it."""
    args = dict(dataset=dataset, dataset_root=str(root), task=task, split="test", seed=0, language="en", batch_size=1,
                annotation_file=None, custom_template_file=None, custom_classname_file=None, wds_cache_dir=None)
    return Job(Namespace(**args | more), Flags(), {}, root).build("test", transform)


def captioned_webdataset(root: Path, *shards: dict[str, tuple[int | bytes, str]], **metadata: dict) -> Path:
    """Write a test set of clip_benchmark's layout: shards of {key: (the number or the file of an image, captions)}.

    Args:
        metadata: KEY.json of some samples.
    """
    for number, samples in enumerate(shards):
        content = {}
        for key, (image, captions) in samples.items():
            content[f"{key}.png"] = png(image) if isinstance(image, int) else image
            content[f"{key}.txt"] = captions.encode()
            if key in metadata:
                content[f"{key}.json"] = json.dumps(metadata[key]).encode()
        write_tar(root / f"test/{number}.tar", content)
    (root / "dataset_type.txt").write_text("retrieval")
    (root / "test/nshards.txt").write_text(f"{len(shards)}\n")
    return root


def labelled_webdataset(root: Path, classes: list[str], templates: list[str], per_split: int = 24,
                       shards: int = 1) -> Path:
    """Write clip_benchmark's layout.

    Image i has class i modulo their number. The first of several shards is the longest.
    """
    for split, first in (("train", 1000), ("test", 0)):
        starts = range(per_split - 3 * (shards - 1), per_split, 3)  # of the shards behind the first
        for shard, rows in enumerate(np.split(np.arange(per_split), starts)):
            write_tar(root / split / f"{shard}.tar", {
                name: data for i in rows.tolist()
                for name, data in ((f"{i}.png", png(first + i)), (f"{i}.cls", b"%d" % (i % len(classes))))})
        (root / split / "nshards.txt").write_text(str(shards))
    (root / "classnames.txt").write_text("\n".join(classes))
    (root / "zeroshot_classification_templates.txt").write_text("\n".join(templates))
    return root


WORDS = ("red", "green", "blue", "yellow", "circle", "square", "star", "triangle")


def order_data(root: Path, images: int = 12) -> Path:
    """ARO's COCO order: a caption of four words an image, and its orders by frozen "perturbations"."""
    from clip_benchmark_ext.selection_datasets import build_dataset
    rows = [{"image": "val2014/" + picture(root / f"val2014/{i}.png", i),
             "caption": [f"a {WORDS[i % 4]} {WORDS[4 + i % 3]} {WORDS[7 - i % 2]}"]} for i in range(images)]
    write_json(root / "coco_karpathy_test.json", rows)
    pytest.importorskip("nltk")
    build_dataset("aro/coco_order", root, tagger=lambda text: [
        (word, "JJ" if word in WORDS[:4] else "NN" if word in WORDS else "DT") for word in text.split()])
    return root
