"""Captioned images, and the captioning task on them by the real command."""
from pathlib import Path

import models
from conftest import read_json, words
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
    return words(*models.flags_of(runs, dataset, data, "--task captioning --batch_size 2 --no_amp", alias=alias))


def evaluate(*arguments, name="result") -> tuple[dict, dict]:
    """The metrics, and what is in the file of captions."""
    metrics = models.evaluate(*arguments, name=name)["metrics"]
    return metrics, read_json(f"captions/{name}.json")
