"""Claims about the files that are written: pandas, pyarrow and webdataset read what was meant, whatever the names."""
import gzip
import io
import os

import pandas as pd
import pytest
import webdataset as wds
from conftest import complaint_of, json_lines, make_image, png
from PIL import Image
from strategies import tar

NAMES = ['a "quoted", one.png', "two\nlines.png", "ümlaut 猫.png", "=1+1.png", "a;b|c\t'd.png"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(NAMES):
        make_image(number, 64).save(folder / name)
    return folder


def test_all_formats_hold_the_same_captions_of_files_that_are_there(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(photos)
    for suffix in ("jsonl", "csv", "parquet"):
        assert complaint_of("caption", *NAMES, "--length", 5, "--workers", 0, "--out", tmp_path / f"x.{suffix}") is None
    lines = pd.read_json(tmp_path / "x.jsonl", lines=True)
    assert sorted(lines["image"]) == sorted(NAMES) and all(lines["caption"])
    for table in (lines, pd.read_csv(tmp_path / "x.csv"), pd.read_parquet(tmp_path / "x.parquet")):
        assert table["caption"].equals(lines["caption"]) and all(map(os.path.isfile, table["image"]))
        assert [*map(os.path.normpath, table["image"])] == [*lines["image"]]


def samples(folder):
    return list(wds.WebDataset([*map(str, folder.rglob("*.tar"))], shardshuffle=False))


def test_webdataset_reads_prepared_shards(photos, tmp_path):
    captions = [f'a "caption" of {number}, 猫 é' for number in range(len(NAMES))]
    pd.DataFrame({"image": NAMES, "caption": captions}).to_json(tmp_path / "table.jsonl", orient="records", lines=True)
    assert complaint_of("prepare", "shards", "--train", tmp_path / "table.jsonl", "--images", photos, "--out",
                        tmp_path / "shards") is None
    found = {sample["txt"].decode(): Image.open(io.BytesIO(sample["png"])).convert("RGB").tobytes()
             for sample in samples(tmp_path / "shards")}
    assert found == {caption: make_image(number, 64).tobytes() for number, caption in enumerate(captions)}


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".TAR.GZ"])
def test_a_compressed_shard_is_a_shard_for_every_command(suffix, tmp_path):
    (tmp_path / "in").mkdir()
    shard = tmp_path / f"in/00000{suffix}"
    shard.write_bytes(gzip.compress(tar({f"{number}.{kind}": data for number in range(3) for kind, data in (
        ("png", png(number, 64)), ("txt", b"a red star"))})))
    for source in (shard, shard.parent):
        out = tmp_path / "captions.jsonl"
        assert complaint_of("caption", source, "--length", 4, "--workers", 0, "--out", out) is None
        assert [row["image"] for row in json_lines(out)] == [f"{shard}::{number}" for number in range(3)]
    for command in (("embed", shard), ("score", "--pairs", shard.parent, "--plain")):
        assert complaint_of(*command, "--workers", 0, "--out", tmp_path / command[0]) is None
        assert len(pd.read_parquet(tmp_path / command[0] / "00000.parquet")) == 3
    assert complaint_of("search", shard, "a red star", "--workers", 0, "--out", tmp_path / "hits.jsonl") is None
    assert complaint_of("prepare", "shards", "--train", shard.parent, "--out", tmp_path / "again") is None
    assert len(samples(tmp_path / "again")) == 3
