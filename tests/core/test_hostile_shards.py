"""Claims about broken and hostile shards, in every reader."""
import os
import tarfile
from pathlib import Path

import pytest
from benchmark.models import built
from conftest import complaint_of, png
from strategies import tar
from training import pipeline

import open_clip_mdc
from clip_benchmark_ext.cli import BENCHMARK
from open_clip_mdc.data import csv_pairs, images, shards

COMMAND = "pipe:touch PWNED;echo x.tar"


def training_samples(url: str, is_train: bool) -> list[tuple]:
    """Return the samples that OpenCLIP's pipeline reads from a shard."""
    return list(pipeline(url, lambda image: image.size, is_train).dataloader.pipeline[0].dataset)


def benchmark_samples(root) -> list:
    """Return the samples that clip_benchmark's reader gives, with what `clip_benchmark` replaces and no more."""
    open_clip_mdc.unregister()
    open_clip_mdc.register(table=BENCHMARK)
    (root / "test").mkdir(parents=True, exist_ok=True)
    (root / "test/nshards.txt").write_text("1")
    for name in ("classnames", "zeroshot_classification_templates"):
        (root / f"{name}.txt").write_text("a\nb")
    return list(built("wds/x", root, "linear_probe", lambda image: image.size, batch_size=2))


def test_a_shard_that_is_called_as_a_command_is_opened_as_the_file_that_it_is(here):
    Path(COMMAND).write_bytes(tar({"0.png": png(1), "0.txt": b"0"}))
    assert [sample["__key__"] for sample in shards.read_samples(COMMAND)] == ["0"]
    assert complaint_of("lengths", COMMAND, "--out", "l.png") is None
    for is_train in (True, False):
        assert len(training_samples(COMMAND, is_train)) >= 1
    root = here / "pipe:touch PWNED;echo "
    (root / "test").mkdir(parents=True)
    (root / "test/0.tar").write_bytes(tar({"0.png": png(1), "0.cls": b"0"}))
    assert len(benchmark_samples(root.relative_to(here))) == 1
    assert not os.path.exists("PWNED")


def test_what_a_task_does_not_read_is_not_decoded(here):
    """webdataset reads KEY.pyd by pickle."""
    (here / "test").mkdir()
    (here / "test/0.tar").write_bytes(tar({
        "0.png": png(1), "0.cls": b"3", "0.json": b"{}", "0.pyd": b"cos\nsystem\n(S'touch PWNED'\ntR.",
        "0.txt.gz": b"no gzip"}))
    assert [label for _, label in benchmark_samples(here)] == [3]
    assert not os.path.exists("PWNED")


def test_a_name_that_comes_again_begins_the_next_sample(tmp_path):
    """As where a tar of LAION ends with the key that the next one begins with."""
    (tmp_path / "0.tar").write_bytes(tar([("a.png", b"1"), ("a.txt", b"one"), ("a.png", b"2"), ("a.txt", b"two"),
                                          ("b.txt", b"b")]))
    found = [(sample["__key__"], sample.get("png"), sample["txt"]) for sample in shards.read_samples(
        str(tmp_path / "0.tar"))]
    assert found == [("a", b"1", b"one"), ("a", b"2", b"two"), ("b", None, b"b")]


def test_a_key_that_comes_again_gets_a_name_that_no_other_has(tmp_path):
    members = [(f"{key}.{suffix}", png(1) if suffix == "png" else b"0") for key in ("a", "a", "a#1") for suffix in (
        "png", "txt")]
    (tmp_path / "0.tar").write_bytes(tar(members))
    names = [name for name, _ in images.named_samples(tmp_path / "0.tar")]
    assert names[:2] == ["a", "a#1"] and len(set(names)) == 3
    (tmp_path / "t.csv").write_text("image,caption\na.png,x\na.png,y\na.png#1,z\n")
    rows = [name for part in csv_pairs.split_csv(tmp_path / "t.csv") for name, *_ in csv_pairs.read_csv(part)]
    assert rows == ["a.png", "a.png#1", "a.png#1#2"]


@pytest.mark.parametrize("size", [-512, -2048])
def test_a_negative_size_ends_a_shard_and_is_not_read_for_ever(tmp_path, size):
    shard, member = tmp_path / "0.tar", tarfile.TarInfo("1.png")
    member.size = size
    whole = tar({"0.png": png(1), "0.txt": b"0"})
    shard.write_bytes(whole[:-1024] + member.tobuf(tarfile.GNU_FORMAT) + bytes(9 * 512))
    assert shards.count_images([shard]) == 1
    for read in (shards.file_names, shards.read_samples):
        with pytest.raises(ValueError, match="not a complete tar file"):
            list(read(str(shard)))
