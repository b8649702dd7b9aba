"""Captioned images, and the captioning task on them by the real command."""
import json
from pathlib import Path

import models
from models import captioned_webdataset

REFERENCES = [  # of the seven images
    ["a red square", "something red", "red"], ["a café in the rain", "ein Café im Regen"], ["雨の中の猫", "a cat"],
    ["two dogs", "2 dogs!"], ["🐈 → 🐕", "cats and dogs"], ["it's a \"sign\"\u2028of (three) lines", "a sign"], ["x"],
]
PER_SHARD = 4


def captioned(root: Path) -> Path:
    """A webdataset as clip_benchmark's: two shards, captions a line each."""
    samples = [(f"key{i}", (i, "\n".join([*texts, ""]))) for i, texts in enumerate(REFERENCES)]
    return captioned_webdataset(root, dict(samples[:PER_SHARD]), dict(samples[PER_SHARD:]),
                                key1={"filename": "COCO_000000000001.jpg"})


def flags(runs, data, alias="mdc", dataset="wds/noise") -> list[str]:
    return [str(x) for x in ("eval", "--model", alias, "--pretrained", runs / alias, "--dataset", dataset,
                             "--dataset_root", data, "--task", "captioning", "--batch_size", 2, "--num_workers", 0,
                             "--no_amp", "--quiet")]


def evaluate(*arguments, name="result") -> tuple[dict, dict]:
    """The metrics, and what is in the file of captions. `arguments` begin as `flags` do."""
    metrics = models.evaluate(*arguments[1:], name=name)["metrics"]
    return metrics, json.loads(Path(f"captions/{name}.json").read_text())
