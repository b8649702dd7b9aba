"""Claims about the files that are written: pandas, pyarrow and webdataset read what was meant, whatever the names."""
import gzip
import io
import json
import os

import pandas as pd
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from conftest import complaint_of, make_image, png
from PIL import Image
from strategies import tar

NAMES = ['a "quoted", one.png', "two\nlines.png", "ümlaut 猫.png", "=1+1.png", "a;b|c\t'd.png"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for number, name in enumerate(NAMES):
        make_image(number, 64).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def tables(photos, tmp_path_factory):
    """(image, caption) of each row, by suffix, as another tool reads the file."""
    out, here = tmp_path_factory.mktemp("out"), os.getcwd()
    os.chdir(photos)
    try:
        for suffix in (".jsonl", ".csv", ".parquet"):
            assert complaint_of("caption", *NAMES, "--length", 5, "--workers", 0, "--out", out / f"x{suffix}") is None
    finally:
        os.chdir(here)
    frames = {".jsonl": pd.read_json(out / "x.jsonl", lines=True), ".csv": pd.read_csv(out / "x.csv"),
              ".parquet": pq.read_table(out / "x.parquet").to_pandas()}
    return {suffix: list(frame[["image", "caption"]].itertuples(index=False, name=None))
            for suffix, frame in frames.items()}


def test_all_formats_hold_the_same_captions_of_files_that_are_there(tables, photos):
    lines = tables[".jsonl"]
    assert sorted(image for image, _ in lines) == sorted(NAMES) and all(caption for _, caption in lines)
    for rows in tables.values():
        assert [caption for _, caption in rows] == [caption for _, caption in lines]
        assert [os.path.normpath(image) for image, _ in rows] == [image for image, _ in lines]
        assert all((photos / image).is_file() for image, _ in rows)


def test_webdataset_reads_prepared_shards(photos, tmp_path):
    table = [{"image": name, "caption": f'a "caption" of {number}, 猫 é'} for number, name in enumerate(NAMES)]
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")
    assert complaint_of("prepare", "shards", "--train", tmp_path / "table.jsonl", "--images", photos, "--out",
                        tmp_path / "shards") is None
    shards = sorted(map(str, (tmp_path / "shards").rglob("*.tar")))
    samples = list(wds.WebDataset(shards, shardshuffle=False))
    assert {sample["txt"].decode() for sample in samples} == {row["caption"] for row in table}
    pixels = {sample["txt"].decode(): Image.open(io.BytesIO(sample["png"])).convert("RGB").tobytes()
              for sample in samples}
    for number, row in enumerate(table):
        assert pixels[row["caption"]] == make_image(number, 64).tobytes()


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".TAR.GZ"])
def test_a_compressed_shard_is_a_shard_for_every_command(suffix, tmp_path):
    (tmp_path / "in").mkdir()
    shard = tmp_path / "in" / f"00000{suffix}"
    shard.write_bytes(gzip.compress(tar({f"{number}.{kind}": data for number in range(3) for kind, data in (
        ("png", png(number, 64)), ("txt", b"a red star"))})))
    found = {}
    for source in (shard, shard.parent):
        out = tmp_path / "captions.jsonl"
        assert complaint_of("caption", source, "--length", 4, "--workers", 0, "--out", out) is None
        found[source] = [json.loads(line)["image"] for line in out.read_text().splitlines()]
    assert found[shard] == found[shard.parent] == [f"{shard}::{number}" for number in range(3)]
    assert complaint_of("embed", shard, "--workers", 0, "--out", tmp_path / "features") is None
    assert complaint_of("score", "--pairs", shard.parent, "--plain", "--workers", 0, "--out", tmp_path / "s") is None
    for folder in ("features", "s"):
        assert len(pq.read_table(tmp_path / folder / "00000.parquet")) == 3
    assert complaint_of("search", shard, "a red star", "--workers", 0, "--out", tmp_path / "hits.jsonl") is None
    assert complaint_of("prepare", "shards", "--train", shard.parent, "--out", tmp_path / "again") is None
    assert sum(len(list(wds.WebDataset(str(path), shardshuffle=False))) for path in (tmp_path / "again").rglob("*.tar")
               ) == 3
