"""Claims about --cache-features: a locked tower runs once an image.

All trainings are by the real command.
"""
import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
import torch
from conftest import read_json, run, saved, times
from PIL import Image
from safetensors import safe_open
from training import equal, holds, open_clip_train, open_clip_train_each, tower, train_flags, weights

import open_clip_mdc
from open_clip_mdc.data.shards import find_shards, read_samples, tar_writer
from open_clip_mdc.integration.feature_cache import batches, digest

# Lists the images that the tower sees in each pass of training, 0 if it gets tokens, validation apart.
COUNTED = """
import json, sys, torch
from open_clip_mdc.models import towers
from open_clip_mdc.models.towers import tower
seen, real = [], towers.patch_tokens
def counted(visual, image, masked=None):
    seen.append(len(image) if image.ndim == 4 else 0)
    return real(visual, image, masked)
towers.patch_tokens = counted
from open_clip_mdc.train import main
assert not main(sys.argv[2:])
open(sys.argv[1], "w").write(json.dumps(seen))
"""


def seen(tmp_path, flags: list[str]) -> list[int]:
    """Train, and return how many images each pass of the tower read, 0 where it was given tokens."""
    run("python", "-c", COUNTED, str(tmp_path / "count"), *flags, fork=True)
    return read_json(tmp_path / "count")


def counted(tmp_path, flags: list[str]) -> int:
    """Train, and return how many images went through the tower."""
    return sum(seen(tmp_path, flags))


@pytest.fixture(scope="module")
def data(scenes):
    return str(scenes / "train/{00000..00003}.tar")


FLAGS = "--dataset-type webdataset --batch-size 8 --train-num-samples 64 --epochs 2 --lock-image --seed 3"


def images_of(data: str) -> set[bytes]:
    return {sample["png"] for shard in find_shards(data) for sample in read_samples(shard)}


def test_the_tower_runs_once_an_image_and_never_again(data, tmp_path):
    """This holds for a second run, too, with another decoder, seed and learning rate, and with worker processes.

    The training of the cached run is repeatable to the last bit.
    """
    cached = (FLAGS, "--cache-features", tmp_path / "cache")
    count = len(images_of(data))
    assert counted(tmp_path, train_flags(*cached, data=data, logs=tmp_path, name="first")) == count
    files = times((tmp_path / "cache").rglob("*.safetensors"))
    assert len(files) == 4 and not list((tmp_path / "cache").rglob(".*"))
    assert counted(tmp_path, train_flags(*cached, data=data, logs=tmp_path, name="again")) == 0
    assert counted(tmp_path, train_flags(*cached, "--lr 1e-4", data=data, logs=tmp_path, name="workers",
                                         model="Mix-ViT-Ti-8-arc50", workers="2")) == 0
    assert files == times((tmp_path / "cache").rglob("*.safetensors"))
    assert equal(weights(tmp_path, 2, "first"), weights(tmp_path, 2, "again"))
    assert holds(weights(tmp_path, 1, "workers"), tower(weights(tmp_path, 2, "first")))


def test_an_image_that_has_a_sample_for_each_caption_is_read_once(tmp_path):
    contents = [saved(Image.new("RGB", (8, 8), (i, 0, 0))) for i in range(3)]
    with tar_writer(tmp_path / "0.tar") as writer:
        for i in range(9):
            writer.write({"__key__": str(i), "png": contents[i % 3], "txt": f"a dog {i}"})
        writer.write({"__key__": "9", "txt": "no image"})
    ((names, image),) = batches(str(tmp_path / "0.tar"), lambda image: torch.tensor(image.getpixel((0, 0))))
    assert names == [digest(content) for content in contents] and image[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_tower_in_16_bit_is_cached_too(data, tmp_path, precision):
    flags = ("--epochs 1 --precision", precision, "--cache-features", tmp_path / "cache")
    open_clip_train(FLAGS, *flags, data=data, logs=tmp_path)
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 4


def test_two_runs_at_once_share_the_work(data, tmp_path):
    """As a table trains two objectives side by side."""
    flags = (FLAGS, "--epochs 1 --cache-features", tmp_path / "cache")
    for name in "ab":
        (tmp_path / name).mkdir()
    with ThreadPoolExecutor(2) as pool:
        seen = pool.map(lambda logs: counted(logs, train_flags(*flags, data=data, logs=logs)),
                        (tmp_path / "a", tmp_path / "b"))
        assert sum(seen) == len(images_of(data))


@torch.no_grad()
def test_what_is_kept_are_the_tokens_of_the_image_as_it_is_evaluated(data, tmp_path):
    """By the model as a user loads it, from the image of the shard. In 16 bit."""
    open_clip_train(FLAGS, "--epochs 1 --cache-features", tmp_path / "cache", data=data, logs=tmp_path)
    model = open_clip_mdc.load(tmp_path / "run", device="cpu")
    rows = {}
    for path in (tmp_path / "cache").rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            rows |= {bytes(d.tolist()): x for d, x in zip(file.get_tensor("digests"), file.get_tensor("tokens"),
                                                          strict=True)}
    images = images_of(data)
    assert len(rows) == len(images)
    for content in sorted(images)[::37]:
        expected = model.encode_image_tokens([Image.open(BytesIO(content))])[0]
        found = rows[hashlib.blake2b(content, digest_size=16).digest()]
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.float(), expected, atol=2e-3, rtol=1e-3)


def test_another_tower_another_size_and_other_shards_have_tokens_of_their_own(data, tmp_path):
    shutil.copy(data.replace("{00000..00003}", "00000"), tmp_path / "0.tar")
    flags = (FLAGS, "--epochs 1 --cache-features", tmp_path / "cache")
    open_clip_train_each(*(train_flags(*flags, *more, data=tmp_path / "0.tar", logs=tmp_path, name=name)
                           for name, more in (("a", ()), ("b", ("--force-image-size 48",)), ("c", ("--seed 4",)),
                                              ("d", ("--image-mean 0.1 0.2 0.3",)))))
    assert len({path.parent for path in (tmp_path / "cache").rglob("*.safetensors")}) == 4
