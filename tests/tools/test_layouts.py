"""Claims about images with captions in common layouts."""
import gc
import json
import os
import shlex
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import complaint_of, json_lines, members, read_json, refused, run
from hypothesis import given
from hypothesis import strategies as st
from layout_files import (
    FIVE,
    LAYOUTS,
    MORE,
    STRUCT,
    N,
    coco,
    hub_parquet,
    imagefolder_csv,
    img2dataset_shards,
    own_csv,
    put,
    put_images,
    put_table,
    text_beside,
)
from shard_files import make_image, samples, texts, tool
from strategies import caption, damage, examples, randoms

from open_clip_mdc import train
from open_clip_mdc.cli.prepare import usable
from open_clip_mdc.cli.prepare_layouts import read, read_parquet
from open_clip_mdc.data.captions import CAPTION_SEPARATOR


@pytest.mark.parametrize("layout", LAYOUTS + MORE, ids=lambda layout: layout.__name__)
def test_every_row_of_a_layout_is_there_byte_for_byte_with_its_own_captions(layout, tmp_path):
    source, names, captions = layout(tmp_path / "in")
    tool("shards", "--train", *source, "--out", tmp_path / "out")
    content = samples(tmp_path / "out/train/00000.tar")
    assert list(content) == [f"{i:08d}" for i in range(N)]
    for i, sample in enumerate(content.values()):
        assert json.loads(sample.pop("json")) == {"filename": names[i], "captions": captions[i]}
        assert sample == {"jpg": make_image(i), "txt": CAPTION_SEPARATOR.join(captions[i]).encode()}


def test_a_chosen_key_alone_is_read(tmp_path):
    put_images(tmp_path / "a")
    for i in range(N):
        put(tmp_path / f"a/{i}.json", {"caption": "wrong", "alt": texts(i)})
    put_table(tmp_path / "b.parquet", {"image": list(map(make_image, range(N))), "caption": ["wrong"] * N, "alt": FIVE})
    for source in ("a", "b.parquet"):
        tool("shards", "--test", tmp_path / source, "--captions-key alt --out", tmp_path / "out" / source[0])
        found = samples(tmp_path / "out" / source[0] / "test/0.tar").values()
        assert [sample["txt"].decode().split("\n") for sample in found] == FIVE


@examples(90)
@given(st.sampled_from(LAYOUTS), randoms, st.booleans())
def test_odd_captions_come_with_their_image_and_damage_is_one_line(tmp_path_factory, layout, rng, damaged):
    folder = tmp_path_factory.mktemp("layout")
    odd = [[" ".join(caption(rng).split()) or "a dog" for _ in range(rng.randrange(1, 6))] for _ in range(N)]
    source, _, captions = layout(folder, odd)
    if damaged:
        file = rng.choice(sorted(path for path in folder.rglob("*") if path.suffix in (
            ".parquet", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".tar")))
        file.write_bytes(damage(file.read_bytes(), rng))
    left_out, own = [], [make_image(i) for i in range(N)]
    try:
        found = [(sample.image, sample.captions) for _, sample in usable(
            read(str(source[0]), [str(source[2])] if source[1:] else [], "captions"), left_out)]
    except (ValueError, OSError) as problem:
        assert damaged and "\n" not in str(problem) and str(folder) in str(problem), problem
        return
    if not damaged:
        assert found == list(zip(own, captions, strict=True))
    elif file.suffix not in (".parquet", ".tar"):  # whose pixels may change with it
        assert all(image in own for image, _ in found)


def complaint(*argv) -> str:
    found = complaint_of("prepare", "shards", *argv)
    assert isinstance(found, str) and "\n" not in found, found
    return found


def test_what_cannot_be_used_stops_it_by_name_or_is_left_out_and_listed(tmp_path, capsys):
    text_beside(tmp_path / "in")
    (tmp_path / "in/sub/1.txt").unlink()
    put(tmp_path / "in/sub/2.txt", b"caf\xe9")
    (tmp_path / "in/sub/3.jpg").unlink()
    (tmp_path / "in/sub/3.jpg").symlink_to("/dev/zero")
    with (tmp_path / "in/sub/4.jpg").open("wb") as file:
        file.truncate(2 ** 28 + 1)
    os.mkfifo(tmp_path / "in/sub/8.jpg")
    put(tmp_path / "in/sub/8.txt", "a pipe")
    put(tmp_path / "in/sub/5.txt", "long " * 10 ** 6)
    argv = ("--train", tmp_path / "in", "--out", tmp_path / "out")
    assert "6 images cannot be used" in complaint(*argv) and not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    for words in ("'sub/1.jpg': no captions", "2.txt, line 1 is no UTF-8 text", "3.jpg is not a regular file",
                  "4.jpg has 268,435,457 bytes", "'sub/5.jpg': captions of 4,999,999 letters",
                  "8.jpg is not a regular file"):
        assert words in said, (words, said)
    assert complaint_of("prepare", "shards", *argv, "--skip-broken") is None
    assert len((tmp_path / "out/left_out.txt").read_text().splitlines()) == 6
    assert [name for name in members(tmp_path / "out/train/00000.tar") if name.endswith("jpg")] == [
        f"{i:08d}.jpg" for i in range(N - 5)]


def test_rows_without_an_image_or_captions_are_named_with_the_keys_that_are_there(tmp_path, capsys):
    table = put_table(tmp_path / "t.parquet", {
        "image": pa.array([None, {"bytes": None, "path": "1.jpg"}, {"bytes": make_image(0), "path": "2.jpg"}], STRUCT),
        "alt_text": ["x", "y", "z"]})
    said = complaint("--train", table, "--out", tmp_path / "out")
    assert "'t.parquet#0': no captions (columns: image, alt_text, see --captions-key)" in said
    assert "2 images cannot be used" in complaint("--train", table, "--captions-key alt_text --out", tmp_path / "o")
    assert "'t.parquet#0': no image\n'1.jpg': no image\n" in capsys.readouterr().err
    rows = put(tmp_path / "c.json", [{"id": "t", "text": "x"}, {"image": ["a.jpg", "b.jpg"], "text": "x"}])
    assert "'row 1 (keys: id, text)': no image" in complaint("--train", rows, "--out", tmp_path / "out")


def test_a_device_in_a_folder_is_no_table(tmp_path):
    (tmp_path / "metadata.csv").symlink_to("/dev/zero")
    assert "holds no image, no shard (.tar) and no table (.parquet)" in complaint("--train", tmp_path, "--out out")


def test_each_split_has_its_images_and_a_name_in_two_folders_is_refused(tmp_path, capsys):
    for split in ("train", "val"):
        put_images(tmp_path / split, f"{split}{{}}.jpg")
        put(tmp_path / f"{split}.json", [{"image": f"{split}{i}.jpg", "captions": FIVE[i]} for i in range(N)])
    argv = ("--train", tmp_path / "train.json", "--val", tmp_path / "val.json", "--images", tmp_path / "train",
            "--images", tmp_path / "val")
    assert complaint_of("prepare", "shards", *argv, "--out", tmp_path / "out") is None
    for split in ("train", "val"):
        found = members(tmp_path / "out" / split / "00000.tar")
        assert all(json.loads(found[f"{i:08d}.json"])["filename"] == f"{split}{i}.jpg" for i in range(N))
    put(tmp_path / "val/train3.jpg", make_image(0))
    assert f"train3.jpg is {tmp_path}/train/train3.jpg and {tmp_path}/val/train3.jpg: give one" in complaint(
        *argv, "--out", tmp_path / "two")


def test_a_damaged_table_is_never_read_in_part(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"image": list(map(make_image, range(N))), "caption": [t[0] for t in FIVE]}), path,
                   compression="none", write_page_checksum=True)
    whole = path.read_bytes()
    place = whole.index(make_image(3)) + 300
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:])
    assert "damaged: fetch or write it again" in complaint("--train", path, "--out", tmp_path / "out", "--skip-broken")
    pq.write_table(pa.table({"image": list(map(make_image, range(N))), "caption": pa.array([b"caf\xe9"] * N).cast(
        pa.string(), safe=False)}), path)
    assert "is damaged: fetch or write it again" in complaint("--train", path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_small_table_that_says_a_large_image_again_and_again_does_not_fill_the_memory(tmp_path):
    """10,000 rows with one image of 10 MB are 4 kB on the disk."""
    big = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array([bytes(10 ** 7)]))
    pq.write_table(pa.table({"image": big, "caption": ["x"] * 10_000}), tmp_path / "t.parquet", compression="zstd",
                   store_schema=False)
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    gc.collect()
    before = pa.total_allocated_bytes()
    for sample in islice(read_parquet([str(tmp_path / "t.parquet")], "captions"), 20):
        assert len(sample.image) == 10 ** 7 and pa.total_allocated_bytes() - before < 10 ** 8


# ---- the way in


def printed_command(text: str) -> list[str]:
    """The arguments of `open_clip_mdc` in a message."""
    argv = shlex.split(text[text.index("open_clip_mdc prepare shards"):])[1:7]
    assert argv[:2] == ["prepare", "shards"] and argv[4] == "--out", argv
    return argv


def asked(layout, folder: Path) -> Path:
    """Return what a user would name: the file, or its folder."""
    source, *_ = layout(folder)
    return folder / "data/train-00000-of-00002.parquet" if layout is hub_parquet else Path(source[0])


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in (img2dataset_shards, own_csv)],
                         ids=lambda layout: layout.__name__)
def test_each_command_prints_the_line_that_makes_shards_of_a_layout(layout, runs, here):
    path = asked(layout, here / "my photos")
    argv = printed_command(refused(SystemExit, train.main, ["--model", "MDC-ViT-Ti-8", "--val-data", str(path)]))
    assert argv[2:4] == ["--val", str(path)]
    said = [complaint_of("score", "--pretrained", runs / "mdc", "--pairs", path, "--out s")]
    if path.is_file():
        said += [complaint_of(name, "--pretrained", runs / "mdc", path, "--out", out) for name, out in (
            ("caption", "c.jsonl"), ("embed", "e"))]
    assert all(printed_command(line)[2:4] == ["--train", str(path)] for line in said), said
    assert complaint_of(*argv) is None
    assert (here / argv[5] / "val/00000.tar").exists()


def test_captions_of_a_table_in_a_folder_of_metadata_are_trained_on_by_the_line_that_is_printed(here):
    imagefolder_csv(here / "in")
    said = refused(SystemExit, train.main, "--model MDC-ViT-Ti-8 --train-data in/metadata.csv".split())
    assert complaint_of(*printed_command(said)) is None


@pytest.mark.parametrize("layout", [hub_parquet, coco], ids=lambda layout: layout.__name__)
def test_a_layout_is_prepared_trained_on_captioned_scored_embedded_and_tested_on(layout, tmp_path):
    """The real commands, as a user would give them."""
    source, names, captions = layout(tmp_path / "in")
    data, model = tmp_path / "data", ("--pretrained", tmp_path / "run", "--device cpu")

    def tools(*argv, module: str = "open_clip_mdc") -> str:
        return run("python", "-m", module, *argv, fork=True, PATH=str(tmp_path)).stdout  # METEOR needs 30 s

    said = tools("prepare", "shards", "--train", *source, "--test", source[0], "--out", data)
    flags = [shlex.split(line.partition(": ")[2]) for line in said.splitlines()]
    tools("--model MDC-ViT-Ti-8", *flags[0],
          "--dataset-type webdataset --epochs 1 --batch-size 4 --workers 1 --precision fp32 --device cpu --name run",
          "--logs", tmp_path, module="open_clip_mdc.train")
    shard = data / "train/00000.tar"
    tools("caption", *model, shard, "--out", tmp_path / "c.jsonl", "--length 5")
    assert [line["image"] for line in json_lines(tmp_path / "c.jsonl")] == [f"{shard}::{i:08d}" for i in range(N)]
    tools("score", *model, "--pairs", shard, "--plain --out", tmp_path / "s")
    rows = pq.read_table(tmp_path / "s/00000.parquet").to_pylist()
    assert [(row["key"], row["caption"]) for row in rows] == [
        (f"{i:08d}", caption) for i in range(N) for caption in captions[i]]
    assert all(row["score"] < 0 for row in rows)
    tools("embed", *model, shard, "--out", tmp_path / "e")
    assert pq.read_table(tmp_path / "e/00000.parquet")["key"].to_pylist() == [f"{i:08d}" for i in range(N)]
    tools("eval", "--model mdc", *model[:2], *flags[1], "--caption_length 5 --output", tmp_path / "r.json", "--no_amp",
          module="clip_benchmark_ext.cli")
    saved = read_json(next((tmp_path / "captions").glob("*.json")))
    assert list(saved["references"].values()) == captions and list(saved["filenames"].values()) == names
