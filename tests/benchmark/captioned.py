"""Captioned images, and the captioning task on them by the real command."""
import json
import tarfile
from pathlib import Path

from conftest import png
from models import add

from clip_benchmark_ext import cli

REFERENCES = [  # of the seven images
    ["a red square", "something red", "red"], ["a café in the rain", "ein Café im Regen"], ["雨の中の猫", "a cat"],
    ["two dogs", "2 dogs!"], ["🐈 → 🐕", "cats and dogs"], ["it's a \"sign\"\u2028of (three) lines", "a sign"], ["x"],
]
PER_SHARD = 4


def captioned(root: Path) -> Path:
    """A webdataset as clip_benchmark's: two shards, captions a line each."""
    (root / "test").mkdir()
    (root / "dataset_type.txt").write_text("retrieval")
    (root / "test" / "nshards.txt").write_text("2\n")
    for shard in range(2):
        with tarfile.open(root / "test" / f"{shard}.tar", "w") as tar:
            for i in range(shard * PER_SHARD, min((shard + 1) * PER_SHARD, len(REFERENCES))):
                add(tar, f"key{i}.png", png(i))
                add(tar, f"key{i}.txt", "\n".join([*REFERENCES[i], ""]).encode())
                if i == 1:
                    add(tar, f"key{i}.json", b'{"filename": "COCO_000000000001.jpg"}')
    return root


def flags(runs, data, alias="mdc", dataset="wds/noise") -> list[str]:
    return [str(x) for x in ("eval", "--model", alias, "--pretrained", runs / alias, "--dataset", dataset,
                             "--dataset_root", data, "--task", "captioning", "--batch_size", 2, "--num_workers", 0,
                             "--no_amp", "--quiet")]


def evaluate(tmp_path, *arguments, name="result") -> tuple[dict, dict]:
    """The metrics, and what is in the file of captions."""
    cli.main([*map(str, arguments), "--output", str(tmp_path / f"{name}.json")])
    return (json.loads((tmp_path / f"{name}.json").read_text())["metrics"],
            json.loads((tmp_path / "captions" / f"{name}.json").read_text()))
