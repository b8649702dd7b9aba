"""Claims about scores of a data set's own captions, and its filter."""
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import (
    complaint_of,
    contents,
    made_images,
    make_image,
    members,
    picture,
    png,
    run_folder,
    saved,
    write_csv,
    write_tar,
)
from open_clip_train.data import get_dataset_size
from shard_files import samples

from open_clip_mdc.data.csv_pairs import read_csv, split_csv
from open_clip_mdc.data.images import decode_image, encode_png
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.likelihood.log_likelihood import mean_image

pq = pytest.importorskip("pyarrow.parquet")
WORDS = ["a red circle", "a blue square up above a star", "two stars", "a green star", "a circle left of a red square"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A run, two shards of twenty images with one caption, but for some odd ones, and the same as a CSV file."""
    folder = tmp_path_factory.mktemp("pairs")
    run_folder(folder / "run", "MDC-ViT-Ti-8")
    odd = {3: "a star\x1ea red  star\n", 5: "", 7: "a red star " * 40}
    rows = []
    for shard in range(2):
        with tar_writer(folder / f"{shard:03d}.tar") as writer:
            for i in range(20):
                n = 20 * shard + i
                text = odd.get(n, WORDS[n % 5])
                sample = {"__key__": f"k{i}", "png": png(n), "txt": text, "json": json.dumps({"n": n, "captions": []})}
                writer.write({name: part for name, part in sample.items() if (n, name) != (6, "txt")})
                picture(folder / f"images/{n}.png", n)
                rows += [(folder / f"images/{n}.png", c) for c in text.split("\x1e") if n != 6]
    write_csv(folder / "pairs.csv", [("n", "caption", "image"), *((i, c, path) for i, (path, c) in enumerate(rows))])
    return folder


def score(place: Path, *argv) -> str | None:
    """The tool's complaint, None if it has none but of the images of `place` without a caption."""
    complaint = complaint_of("score", "--pretrained", place / "run", "--device cpu --workers 0", *argv)
    skipped = (complaint or "").split("\n")[1:]
    return None if skipped and all(line.endswith(": no caption") for line in skipped) else complaint


def tables(folder: Path) -> list[dict]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def scored(place, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("scored") / "scores"
    assert score(place, "--pairs", f"{place}/{{000..001}}.tar", "--out", out, "--alpha 0.5 --batch-size 8") is None
    return out


def test_every_caption_has_the_score_that_the_model_gives_it_alone(place, scored):
    rows = tables(scored)
    model, transform, tokenizer = checkpoints.load(str(place / "run"))
    image = made_images(transform, 40)
    blind = mean_image(model, [image])
    expected = [(n, c) for n in range(40) for c in {
        3: ["a star", "a red star"], 5: [], 6: [], 7: [" ".join(["a red star"] * 40)]}.get(n, [WORDS[n % 5]])]
    assert [(row["key"], row["caption"]) for row in rows] == [(f"k{n % 20}", c) for n, c in expected]
    for row, (n, caption) in zip(rows, expected, strict=True):
        if n == 7:
            assert {row[name] for name in ("score", "blind", "debiased", "num_tokens")} == {None}
            continue
        text = tokenizer([caption])
        plain = float(model.log_likelihood(image[n:n + 1], text))
        prior = float(model.log_likelihood(None, text[None], blind=blind))
        assert row["score"] == pytest.approx(plain, abs=1e-3) and row["blind"] == pytest.approx(prior, abs=1e-3)
        assert row["debiased"] == pytest.approx(plain - 0.5 * prior, abs=2e-3)
        assert row["num_tokens"] == len(tokenizer.encode(caption)) + 1  # EOT is scored, too


def test_a_csv_file_is_scored_in_parts_as_its_shards_are(place, scored, tmp_path, monkeypatch):
    from open_clip_mdc.cli import score_pairs
    monkeypatch.setattr(score_pairs, "split_csv", lambda path: split_csv(path, 16))
    assert score(place, "--pairs", place / "pairs.csv", "--out", tmp_path / "s", "--alpha 0.5 --blind-images",
                 place / "images") is None
    assert sorted(p.name for p in (tmp_path / "s").glob("*.parquet")) == [f"pairs-0000{i}.parquet" for i in range(3)]
    rows, wanted = tables(tmp_path / "s"), tables(scored)
    assert [row["caption"] for row in rows] == [row["caption"] for row in wanted]
    for row, one in zip(rows, wanted, strict=True):
        assert row["score"] == (one["score"] and pytest.approx(one["score"], abs=1e-3))


def test_the_parts_of_a_csv_file_are_its_rows_whatever_is_quoted_or_long(tmp_path):
    rows = [(f"{i}.png", f'line\n"{i}", é\r\n' * (i % 3)) for i in range(22)]
    rows += [("22.png", "a red circle " * 20_000), ("0.png", "again")]
    write_csv(tmp_path / "p.csv", [("image", "caption"), *rows])
    for size in (1, 5, 24, 100):
        parts = split_csv(tmp_path / "p.csv", size)
        found = [row for part in parts for row in read_csv(part)]
        assert [(str(path.name), caption) for _, path, caption in found] == rows
        assert len(parts) == -(-24 // size) and (size < 24 or found[-1][0] == "0.png#23")


def test_the_share_that_is_kept_is_the_best_by_debiased_score(place, scored, tmp_path, capsys):
    argv = ("--pairs", f"{place}/{{000..001}}.tar", "--out", scored, "--alpha 0.5 --top 0.3 --out-shards",
            tmp_path / "kept")
    assert score(place, *argv) is None
    rows = [(path.stem, row["key"], row["caption"], row["debiased"]) for path in sorted(scored.glob("*.parquet"))
            for row in pq.read_table(path).to_pylist() if row["debiased"] is not None]
    best = sorted(rows, key=lambda row: -row[-1])[:round(0.3 * len(rows))]
    assert f"{len(best)} captions of" in capsys.readouterr().out
    found = []
    for shard in ("000", "001"):
        for sample in samples(tmp_path / f"kept/{shard}.tar").values():
            n, captions = json.loads(sample["json"]).values()  # a reader of either finds what is kept
            assert sample["png"] == png(n) and n // 20 == int(shard)
            assert captions == sample["txt"].decode().split("\x1e")
            found += [(shard, f"k{n % 20}", c) for c in captions]
    assert sorted(found) == sorted(row[:3] for row in best)
    assert get_dataset_size(f"{tmp_path}/kept/{{000..001}}.tar") == (len({row[:2] for row in best}), 2)
    before = contents(tmp_path / "kept")
    (tmp_path / "kept/001.tar").unlink()
    assert score(place, *argv) is None and contents(tmp_path / "kept") == before
    complaint = score(place, *argv, "--top 0.5")
    assert "give another --out-shards" in complaint and "\n" not in complaint


def test_a_table_of_another_unit_of_the_same_name_is_not_taken_for_this_ones(place, tmp_path):
    """img2dataset calls the first shard of every data set 00000.tar: captions were kept beside others' images."""
    (tmp_path / "x").mkdir()
    shard = tmp_path / "x/000.tar"
    shutil.copy(place / "000.tar", shard)
    argv = ("--out", tmp_path / "s", "--top 1 --out-shards", tmp_path / "kept", "--blind-images", place / "images")
    assert score(place, "--pairs", shard, *argv) is None
    before = [contents(tmp_path / folder) for folder in ("s", "kept")]
    table = tmp_path / "s/000.parquet"
    assert score(place, "--pairs", place / "000.tar", *argv) == (
        f"error: --out: {table} was made of {shard}, not {place}/000.tar: remove it, or choose another folder")
    assert score(place, "--pairs", place / "000.tar", "--out", tmp_path / "s2", *argv[2:]) == (
        f"error: --out-shards: {tmp_path}/kept/000.tar was made of {shard}, not {place}/000.tar: remove it, or choose "
        "another folder")
    shutil.copy(place / "001.tar", shard)
    assert score(place, "--pairs", shard, *argv) == (
        f"error: --out: {table} was made of {shard} before that changed: remove it, or choose another folder")
    assert [contents(tmp_path / folder) for folder in ("s", "kept")] == before
    (tmp_path / "others").mkdir()
    (tmp_path / "others/a.tar").write_bytes(bytes(1024))
    (tmp_path / "others/a_stats.json").write_text('{"count": 5, "successes": 4}')  # as img2dataset writes it
    assert "others/a.tar was not written by this command" in score(
        place, "--pairs", place / "000.tar", "--out", tmp_path / "s2", "--top 1 --out-shards", tmp_path / "others",
        "--blind-images", place / "images")
    table.unlink()
    assert score(place, "--pairs", shard, "--out", tmp_path / "s", "--blind-images", place / "images") is None


def test_scores_against_other_mean_images_are_not_mixed(place, tmp_path):
    """It is of 256 images of all shards: more shards give another one, and other scores."""
    alone = ("--pairs", place / "000.tar", "--out", tmp_path / "s")
    assert "give 32 or more by --blind-images" in score(place, *alone, "--top 1 --out-shards", tmp_path / "kept")
    assert score(place, "--pairs", place / "000.tar", "--out", tmp_path / "plain") is None
    rows = tables(tmp_path / "plain")
    assert {row["score"] is not None for row in rows} and {row["blind"] or row["debiased"] for row in rows} == {None}
    assert score(place, *alone, "--blind-images", place / "000.tar", place / "images") is None
    complaint = score(place, "--pairs", f"{place}/{{000..001}}.tar", "--out", tmp_path / "s")
    assert "000.parquet was made with blind the mean of 60 images" in complaint and "\n" not in complaint


def test_what_a_csv_file_keeps_becomes_shards_too(place, tmp_path):
    assert score(place, "--pairs", place / "pairs.csv", "--out", tmp_path / "s", "--top 1 --out-shards",
                 tmp_path / "kept") is None
    kept = samples(tmp_path / "kept/pairs-00000.tar").values()
    assert [(sample["txt"].decode(), sample["png"]) for sample in kept] == [
        (row["caption"], Path(row["key"].split("#")[0]).read_bytes())
        for row in tables(tmp_path / "s") if row["debiased"] is not None]


def test_a_pair_whose_name_is_no_utf_8_is_kept(place, tmp_path):
    shard = write_tar(tmp_path / "a.tar", {"k\udcff.png": png(1), "k\udcff.txt": b"a star", "k.png": png(2),
                                           "k.txt": b"two stars"})
    assert score(place, "--pairs", shard, "--out", tmp_path / "s", "--top 1 --blind-images", place / "images",
                 "--out-shards", tmp_path / "kept") is None
    kept = members(tmp_path / "kept/a.tar")
    assert [kept[name] for name in kept if name.endswith("png")] == [png(1), png(2)]


def test_an_image_that_shards_cannot_hold_is_kept_as_a_png(place, tmp_path):
    rows = [("image", "caption")]
    for kind in ("gif", "bmp", "jpeg"):
        make_image(1).save(tmp_path / f"a.{kind}")
        rows.append((tmp_path / f"a.{kind}", "a star"))
    write_csv(tmp_path / "p.csv", rows)
    argv = ("--pairs", tmp_path / "p.csv", "--out", tmp_path / "s", "--top 1 --blind-images", place / "images",
            "--out-shards")
    assert score(place, *argv, tmp_path / "kept") is None
    gif, bmp, jpeg = (data for name, data in members(tmp_path / "kept/p-00000.tar").items()
                      if name.endswith(("png", "jpg")))
    assert (bmp, jpeg) == (png(1), (tmp_path / "a.jpeg").read_bytes())
    assert gif == encode_png(decode_image(tmp_path / "a.gif"))
    (tmp_path / "a.gif").unlink()
    assert f"was made of {tmp_path}/p.csv before it or an image in it changed: " in score(place, *argv, tmp_path / "l")


def test_a_unit_is_told_by_the_content_of_its_files(place, tmp_path):
    """Size and time do not count, as rsync, cp -p and containers keep them.

    A file that was only touched is unchanged.
    """
    blind = ("--blind-images", place / "images")
    write_tar(tmp_path / "a.tar", {"k.png": png(1), "k.txt": b"a star"})
    (tmp_path / "b.csv").write_text(f"image,caption\n{tmp_path}/1.bmp,a star\n")
    bmp, other = (saved(make_image(n), "BMP") for n in (1, 2))
    (tmp_path / "folder").mkdir()
    for name in ("1.bmp", "folder/1.bmp"):
        (tmp_path / name).write_bytes(bmp)
    for changes, *argv in (("a.tar", "score", "--pairs", tmp_path / "a.tar", *blind),
                           ("1.bmp", "score", "--pairs", tmp_path / "b.csv", *blind),
                           ("folder/1.bmp", "embed", tmp_path / "folder")):
        argv += ["--pretrained", place / "run", "--workers 0 --out", tmp_path / f"of-{argv[0]}"]
        path = tmp_path / changes
        before, stat = path.read_bytes(), path.stat()
        assert complaint_of(*argv) is None, changes
        path.write_bytes(before.replace(b"a star", b"a bird").replace(bmp, other))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert path.stat().st_size == stat.st_size and "changed: remove it" in complaint_of(*argv), changes
        path.unlink()
        path.write_bytes(before)
        assert complaint_of(*argv) is None, changes


def test_mean_images_are_told_by_their_pixels(place, tmp_path):
    shutil.copytree(place / "images", tmp_path / "i")
    argv = ("--pairs", place / "000.tar", "--out", tmp_path / "s", "--blind-images", tmp_path / "i")
    assert score(place, *argv) is None
    (tmp_path / "s/000.parquet").rename(tmp_path / "s/other.parquet")
    (tmp_path / "i").rename(tmp_path / "j")
    assert score(place, *argv[:-1], tmp_path / "j", "--batch-size 7") is None
    (tmp_path / "s/000.parquet").unlink()
    (tmp_path / "j/3.png").write_bytes(png(99))
    assert "was made with blind the mean of 40 images" in score(place, *argv[:-1], tmp_path / "j")


def test_every_row_that_is_left_out_is_named(place, tmp_path):
    """The mean image of no image at all was the complaint about a missing one."""
    rows = [f"{place}/images/{n}.png\t{'' if n == 3 else 'None'}\n" for n in range(40)]
    rows[1] = f"{place}/images/none.png\ta star\n"
    (tmp_path / "p.tsv").write_text("filepath\ttitle\n" + "".join(rows))
    complaint = complaint_of("score", "--pretrained", place / "run", "--workers 0 --pairs", tmp_path / "p.tsv", "--out",
                             tmp_path / "s")
    first, *named = complaint.split("\n  ")
    assert "2 skipped, all else is written" in first and len(named) == 2, complaint
    assert any("images/none.png" in line for line in named) and f"{place}/images/3.png: no caption" in named
    found = tables(tmp_path / "s")
    assert len(found) == 38 and {row["caption"] for row in found} == {"None"} and all(row["score"] for row in found)


def test_texts_of_a_caption_a_line_are_said_to_be_one_caption(place, tmp_path, capsys):
    with tar_writer(tmp_path / "0.tar") as writer:
        for n in range(32):
            writer.write({"__key__": f"{n}", "png": png(n), "txt": "a star\na red star"})
    assert score(place, "--pairs", tmp_path / "0.tar", "--out", tmp_path / "s") is None
    assert "have several lines" in (said := capsys.readouterr().err) and "prepare shards" in said
    assert complaint_of("prepare", "shards", "--train", tmp_path / "0.tar", "--out", tmp_path / "prepared") is None
    capsys.readouterr()
    assert score(place, "--pairs", tmp_path / "prepared/train/00000.tar", "--out", tmp_path / "t") is None
    assert "have several lines" not in capsys.readouterr().err
    assert [row["caption"] for row in tables(tmp_path / "t")] == ["a star", "a red star"] * 32
