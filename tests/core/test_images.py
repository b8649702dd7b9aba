"""Claims about users' images: each is read alike everywhere, and folders and shards may hold any format."""
import base64
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from benchmark.models import built
from conftest import complaint_of, png, saved, write_tar
from conftest import picture as noise
from PIL import Image, features
from torchvision.transforms.functional import pil_to_tensor
from training import pipeline

from experiments import judge
from open_clip_mdc.bulk.tables import read_about
from open_clip_mdc.data import images
from open_clip_mdc.data.paths import find_images
from open_clip_mdc.data.shards import COUNTED, count_images, members, read_samples
from open_clip_mdc.integration.csv_images import CsvImages
from open_clip_mdc.integration.pretrained import PretrainedCaptioner

GREY = (np.arange(24 * 40, dtype=np.uint16) * 68).reshape(24, 40)


def picture() -> Image.Image:
    """40 x 24 pixels, each unlike its mirror images."""
    return Image.fromarray(np.stack([GREY % 251, GREY % 241, GREY % 239], -1).astype(np.uint8))


def save(image: Image.Image, kind: str, orientation: int | None = None, **options) -> bytes:
    if orientation:
        options["exif"] = exif = Image.Exif()
        exif[0x0112] = orientation
    return saved(image, kind, **options)


def stored(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"))


def photographs() -> dict[str, tuple[bytes, np.ndarray]]:
    """Files, and the pixels that every path should see. (test_damaged_files has one path see many more.)"""
    files = {}
    for kind in ("JPEG", "PNG", "WEBP", "AVIF")[:3 + features.check("avif")]:
        data = save(picture(), kind, 6)
        files[f"turned.{kind.lower()}"] = data, np.rot90(stored(data), -1)
    for mode in ("RGB", "L"):
        image = picture().convert(mode)
        files[f"{mode}.tif"] = save(image, "TIFF", 6), np.rot90(np.asarray(image.convert("RGB")), -1)
    files["sixteen.png"] = save(Image.fromarray(GREY), "PNG"), np.repeat(GREY[..., None] >> 8, 3, -1)
    files["transparent.png"] = (data := save(picture().convert("P"), "PNG", transparency=3)), stored(data)
    files["cmyk.jpg"] = (data := save(picture().convert("CMYK"), "JPEG")), stored(data)
    still = save(picture(), "GIF", save_all=True, append_images=[picture().rotate(180)])
    files["moving.gif"] = still, stored(still)
    return files


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """The files in a folder, as shards of both kinds of clip_benchmark, and as a CSV file."""
    folder = tmp_path_factory.mktemp("photos")
    for name, (data, _) in photographs().items():
        (folder / name).write_bytes(data)
    for part in ("cls", "retrieval"):
        write_tar(folder / part / "test/0.tar", {
            f"{number:03d}{suffix}": content for number, (name, (data, _)) in enumerate(photographs().items())
            for suffix, content in ((Path(name).suffix, data), (".txt", name.encode()), (".cls", b"%d" % number))})
        (folder / part / "test/nshards.txt").write_text("1")
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        (folder / "cls" / name).write_text("words")
    (folder / "retrieval/dataset_type.txt").write_text("retrieval")
    pd.DataFrame([{"filepath": folder / name, "title": name} for name in photographs()]).to_csv(
        folder / "pairs.csv", sep="\t", index=False)
    return folder


def training(photos: Path, is_train: bool) -> dict[str, np.ndarray]:
    """Return the images that OpenCLIP's pipeline gives to the transform, by the text beside them."""
    info = pipeline(photos / "retrieval/test/0.tar", pil_to_tensor, is_train,
                    train_num_samples=len(photographs()))
    return {name: image[0].permute(1, 2, 0).numpy() for image, (name,) in info.dataloader}


def each(photos: Path, function) -> dict[str, np.ndarray]:
    return {name: np.asarray(function(photos / name)) for name in photographs()}


def in_memory(photos: Path) -> dict[str, np.ndarray]:
    captioner = PretrainedCaptioner(None, pil_to_tensor, None, "cpu", "fp32")
    return each(photos, lambda path: next(captioner.batches([Image.open(path)]))[0].permute(1, 2, 0))


def csv(photos: Path) -> dict[str, np.ndarray]:
    rows = CsvImages(str(photos / "pairs.csv"), np.asarray, "filepath", "title", tokenizer=lambda texts: texts)
    return {name: image for image, name in rows}


def pairs(photos: Path) -> dict[str, np.ndarray]:
    shard = str(photos / "retrieval/test/0.tar")
    return {name: image for image, name in images.read_pairs([shard], np.asarray, lambda text: [text])}


def classification(photos: Path) -> dict[str, np.ndarray]:
    names = list(photographs())
    return {names[label]: image for image, label in built("wds/x", photos / "cls", "linear_probe", np.asarray)}


def captioning(photos: Path) -> dict[str, np.ndarray]:
    return {name: image for image, (name,), *_ in built("wds/x", photos / "retrieval", "captioning", np.asarray)}


def folders(photos: Path) -> dict[str, np.ndarray]:
    for name in photographs():
        (photos / "own/val" / name).mkdir(parents=True)
        shutil.copy(photos / name, photos / "own/val" / name)
    dataset = built("folder", photos / "own", "zeroshot_classification", np.asarray)
    assert dataset.classes == list(dataset.class_to_idx) and "a photo of a {c}." in dataset.templates
    return {dataset.classes[label]: image for image, label in dataset}


PATHS = {
    "files": lambda photos: each(photos, images.open_image), "memory": in_memory,
    "selection": lambda photos: each(photos, images.decode_image), "csv": csv, "pairs": pairs,
    "classification": classification, "captioning": captioning, "folders": folders,
    "training": lambda photos: training(photos, True), "validation": lambda photos: training(photos, False),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_path_sees_one_picture_the_way_up_that_the_camera_noted(photos, path):
    seen = PATHS[path](photos)
    assert seen.keys() == photographs().keys()
    assert not [name for name, (_, right) in photographs().items() if not np.array_equal(seen[name], right)]


def test_a_box_of_a_data_file_is_cut_from_the_pixels_as_stored(tmp_path):
    (tmp_path / "turned.png").write_bytes(save(picture(), "PNG", 6))
    right = np.rot90(np.asarray(picture())[3:11, 5:30], -1)
    assert np.array_equal(np.asarray(images.decode_image(tmp_path / "turned.png", box=(5, 3, 30, 11))), right)


# ---- what a folder and a shard hold


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Images under all kinds of names, what is no image, what is hidden, and images that cannot be read."""
    folder = tmp_path_factory.mktemp("folder")
    good = {"a.jpg": "JPEG", "b.JFIF": "JPEG", "c.tif": "TIFF", "d.bmp": "BMP", "e.gif": "GIF", "f.ppm": "PPM",
            "jpeg": "JPEG", "photo.jpg_large": "JPEG", "inner/g.tiff": "TIFF", "v1.0.png": "PNG"}
    bad = {"heic.heic": b"\0\0\0\x18ftypheic", "raw.dng": b"II*\0", "text.jpg": b"no image", "vector.svg": b"<svg/>"}
    others = {"a.txt": b"a caption", "a.json": b"{}", "BMW": b"BMW cars", "list.csv": b"a,b\n", "none": b""}
    hidden = {".thumbnails/a.jpg": "JPEG", "._a.jpg": "JPEG", "__MACOSX/a.jpg": "JPEG", ".DS_Store": "PNG"}
    for name, content in {**good, **hidden, **bad, **others}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(save(picture(), content) if isinstance(content, str) else content)
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    return folder


GOOD = ["a.jpg", "b.JFIF", "c.tif", "d.bmp", "e.gif", "f.ppm", "inner/g.tiff", "jpeg", "photo.jpg_large", "v1.0.png"]
BAD = ["gone.png", "heic.heic", "raw.dng", "text.jpg", "vector.svg"]


def test_a_folder_holds_all_that_can_be_read_and_names_what_cannot(folder):
    found = [str(path.relative_to(folder)) for path in find_images([str(folder)])]
    assert found == sorted([*GOOD, *BAD], key=lambda name: Path(name).parts)


COMMANDS = {"caption": ("{}", "--length 2 --out c.jsonl"), "embed": ("{}", "--out e"),
            "caption to tables": ("{}", "--length 2 --out c"),
            "attention": ("{}", "--length 2 --out a.html"),
            "score": ("--images {} --captions texts --blind-images many --out s.csv",)}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_what_it_skips_by_one_status_and_writes_the_rest(command, folder, runs, here, capsys):
    for number in range(32):
        noise(Path(f"many/{number}.png"), number)
    Path("texts").write_text("a star")
    argv = [str(part).format(folder) for part in COMMANDS[command]]
    complaint = complaint_of(command.split()[0], "--pretrained", runs / "mdc", "--device cpu", *argv)
    assert complaint.startswith("error: ") and "5 skipped, all else is written:\n" in complaint
    assert [name for name in [*GOOD, *BAD] if f"{folder}/{name}" in complaint] == BAD
    out = Path(argv[-1].split()[-1])
    assert (read_about(next(out.glob("*.parquet")))["stats"]["images"] if out.is_dir() else
            out.read_text().count("<article" if out.suffix == ".html" else f"{folder}/")) == len(GOOD)


SHARD = {"img_1.V1.0.png": "PNG", "img_1.V1.0.txt": "one", "img_1.V2.0.PNG": "PNG", "img_1.V2.0.txt": "two",
         "img_1.V2.0.depth.png": "PNG", "b.bmp": "BMP", "b.txt": "three", "c.gif": "GIF", "c.txt": "four",
         "d.tif": "TIFF", "d.txt": "five",
         "e.depth.png": "PNG", "e.jpg": "JPEG", "e.txt": "six", "cat.jpg": "JPEG", "cat.txt": "seven",
         "cat.v2.jpg": "JPEG", "cat.v2.txt": "eight", "cat.v2.mask.png": "PNG",
         "in/._b.jpg": "JPEG", "f.txt": "no image", "f.json": "{}"}
KEYS = {"img_1.V1.0": "one", "img_1.V2.0": "two", "b": "three", "c": "four", "d": "five", "e": "six", "cat": "seven",
        "cat.v2": "eight"}


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> Path:
    content = {name: save(picture(), value) if value.isupper() else value.encode() for name, value in SHARD.items()}
    return write_tar(tmp_path_factory.mktemp("shard") / "test/0.tar", content)


@pytest.mark.parametrize("is_train", [True, False])
def test_training_sees_every_sample_and_logs_what_has_no_image(shard, is_train, caplog, tmp_path):
    empty = write_tar(tmp_path / "1.tar", {"x.txt": b"words", "y.txt": b"more words"})
    (_, texts), = pipeline(f"{shard}::{empty}", pil_to_tensor, is_train, train_num_samples=8, batch_size=8).dataloader
    assert sorted(texts) == sorted(KEYS.values())
    assert "Left out 3 of the samples, in 2 of the shards" in caplog.text and "any other sample: 1." in caplog.text
    assert "sample f (txt, json)" in caplog.text or "sample x (txt)" in caplog.text


def test_the_tools_name_samples_without_an_image_and_refuse_a_shard_that_has_none(shard, runs, tmp_path):
    empty = write_tar(tmp_path / "empty.tar", {"x.txt": b"words", "y.txt": b"more words"})
    flags = "--pretrained", runs / "mdc", "--device cpu --length 2 --workers 0"
    for out in ("c.jsonl", "c"):
        complaint = complaint_of("caption", *flags, shard, "--out", tmp_path / out)
        assert complaint == (f"error: 1 skipped, all else is written:\n  {shard}: no image in 1 of its samples. The "
                             "first is sample f (txt, json)")
        complaint = complaint_of("caption", *flags, empty, "--out", tmp_path / f"no-{out}")
        assert f"{empty}: none of its 2 samples has an image. The first is sample x (txt)" in complaint
    assert len((tmp_path / "c.jsonl").read_text().splitlines()) == read_about(tmp_path / "c/0.parquet")["stats"][
        "rows"] == 8
    assert not (tmp_path / "no-c/empty.parquet").exists()


def test_prepare_takes_every_format_and_names_what_has_no_image(tmp_path):
    words = b'{"captions": ["words"]}'
    source = write_tar(tmp_path / "s.tar", {
        "a.gif": save(picture(), "GIF"), "a.json": words, "b.tif": save(picture(), "TIFF", 6), "b.json": words,
        "c.v1.jpg": save(picture(), "JPEG", 6), "c.v1.json": words, "none.json": words})
    argv = "prepare", "shards", "--train", source, "--out", tmp_path / "out"
    assert "1 image cannot be used" in complaint_of(*argv)
    assert complaint_of(*argv, "--skip-broken") is None
    assert (tmp_path / "out/left_out.txt").read_text() == "'sample none (json)': no image\n"
    samples = list(read_samples(str(tmp_path / "out/train/00000.tar")))
    assert [sorted(members(sample)) for sample in samples] == [["json", "png", "txt"]] * 2 + [["jpg", "json", "txt"]]
    sizes = [images.sample_image(sample).size for sample in samples]
    assert sizes == [(40, 24), (24, 40), (24, 40)]  # turned once, not twice


def test_the_judge_sees_images_upright_and_in_formats_that_servers_take(shard, tmp_path):
    files = ("JPEG", 6, "png"), ("JPEG", None, "jpeg"), ("TIFF", None, "png")
    for number, (kind, orientation, mime) in enumerate(files):
        (tmp_path / f"{number}").write_bytes(data := save(picture(), kind, orientation))
        head, url = judge.read_url(judge.Place(tmp_path / f"{number}")).split(",")
        assert head == f"data:image/{mime};base64" and (mime == "png" or base64.b64decode(url) == data)
        sent = Image.open(io.BytesIO(base64.b64decode(url)))
        assert sent.size == ((24, 40) if orientation else (40, 24)) and not sent.getexif()
    assert judge.find_places(str(shard), set(KEYS)).keys() == KEYS.keys()


def test_a_shard_is_read_once_by_any_number_of_workers_and_gives_the_same_batches(tmp_path, monkeypatch):
    shard, opened = write_tar(tmp_path / "s.tar", {f"{i:02d}.png": png(i) for i in range(11)}), tmp_path / "opened"
    original = images.read_images

    def counted(paths):
        with opened.open("a") as file:
            file.write(f"{os.getpid()}\n")
        yield from original(paths)

    monkeypatch.setattr(images, "read_images", counted)
    made = [list(images.Images([shard], pil_to_tensor, 3).loader(workers)) for workers in (0, 2, 3)]
    assert opened.read_text().split() == [str(os.getpid())] * 3
    for batches in made:
        assert [batch.names for batch in batches] == [batch.names for batch in made[0]]
        assert all(torch.equal(a.image, b.image) for a, b in zip(batches, made[0], strict=True))
    assert [len(batch.names) for batch in made[0]] == [3, 3, 3, 2]


def test_bars_know_how_many_images_come_in_shards_with_and_without_sizes_in_tables_and_in_folders(tmp_path):
    """Masks beside images, macOS's copies and captions are no images of their own. A cut end is no error here."""
    def shard(name: str, count: int) -> Path:
        files = {f"in/{i:03d}{suffix}": b"x" * 600 for i in range(count) for suffix in (".jpg", ".mask.png", ".txt")}
        return write_tar(tmp_path / name, files | {"in/._000.jpg": b"x"})

    counted = [shard(f"counted{i}.tar", 4 + i) for i in range(2)]
    (tmp_path / "cut.tar").write_bytes(shard("whole.tar", 6).read_bytes()[:6000])
    noise(tmp_path / "photos/a.png", 0)
    assert count_images(counted) == 9 and count_images(counted, 7) == 7 and count_images(counted, 70) == 9
    assert 1 <= count_images([tmp_path / "cut.tar"]) < 6 and count_images([tmp_path / "none.tar"]) == 0
    assert count_images([*counted, tmp_path / "photos", tmp_path / "photos/a.png"]) == 11
    many = [shard(f"many{i}.tar", 2 * (i < COUNTED) + 1) for i in range(COUNTED + 4)]
    assert count_images(many) == 3 * len(many)  # the last ones are taken for like the first
    (tmp_path / "sizes.json").write_text('{"counted0.tar": 50, "counted1.tar": -1}')
    assert count_images(counted) == 55
