"""Write eight images with captions in each of the common layouts.

Each function returns the value of `open_clip_mdc prepare shards --train`, the names of the images, and their captions.
"""
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from conftest import write_csv, write_tar
from shard_files import make_image, texts

N = 8
FIVE = [texts(i) for i in range(N)]
Made = tuple[tuple, list[str], list[list[str]]]


def put(path: Path, content: bytes | str | list | dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else
                     (content if isinstance(content, str) else json.dumps(content)).encode())
    return path


def put_images(folder: Path, name: str = "{}.jpg") -> list[str]:
    names = [name.format(i) for i in range(N)]
    for i in range(N):
        put(folder / names[i], make_image(i))
    return names


def put_table(path: Path, columns: dict, schema: pa.Schema | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns, schema=schema), path, row_group_size=3)
    return path


def first(five: list) -> list:
    return [captions[:1] for captions in five]


def text_beside(folder: Path, five: list = FIVE) -> Made:
    names = put_images(folder, "sub/{}.jpg")
    for i in range(N):
        put(folder / f"sub/{i}.txt", ("\n".join(five[i]) + "\r\n").encode(("utf-8", "utf-8-sig", "utf-16")[i % 3]))
    put(folder / ".thumbnails/0.jpg", make_image(1))
    return (folder,), names, five


def json_beside(folder: Path, five: list = FIVE) -> Made:
    names = put_images(folder)
    for i in range(N):
        put(folder / f"{i}.json", [{"captions": five[i]}, {"caption": five[i]}, {"text": five[i]}][i % 3])
    return (folder,), names, five


# As img2dataset's writer.py: what it knows of an image, those that could not be fetched among them.
ABOUT = pa.schema([("url", pa.string()), ("caption", pa.string()), ("key", pa.string()), ("status", pa.string()),
                   ("error_message", pa.string()), ("width", pa.int32()), ("height", pa.int32()), ("exif", pa.string()),
                   ("sha256", pa.string())])


def img2dataset_rows(five: list) -> list[dict]:
    return [{"url": f"https://x/{i}.jpg", "caption": five[i][0], "key": f"{i:09d}", "status": "success",
             "error_message": None, "width": 40 + i, "height": 40, "exif": "{}", "sha256": f"{i:064x}"}
            for i in range(N)]


def img2dataset_files(folder: Path, five: list = FIVE) -> Made:
    rows = img2dataset_rows(five)
    for i, row in enumerate(rows):
        put(folder / f"00000/{i:09d}.jpg", make_image(i))
        put(folder / f"00000/{i:09d}.txt", row["caption"])
        put(folder / f"00000/{i:09d}.json", row)
    put_table(folder / "00000.parquet", {name: [row[name] for row in rows] for name in ABOUT.names}, ABOUT)
    put(folder / "00000_stats.json", {"count": N, "successes": N})
    return (folder,), [f"00000/{i:09d}.jpg" for i in range(N)], first(five)


def img2dataset_shards(folder: Path, five: list = FIVE) -> Made:
    """The files of `img2dataset_files` as the shard 00000.tar."""
    img2dataset_files(folder, five)
    write_tar(folder / "00000.tar", {path.name: path.read_bytes() for path in sorted((folder / "00000").iterdir())})
    shutil.rmtree(folder / "00000")
    return (folder,), [f"{i:09d}.jpg" for i in range(N)], first(five)


def img2dataset_parquet(folder: Path, five: list = FIVE) -> Made:
    rows = img2dataset_rows(five)
    put_table(folder / "00000.parquet", {name: [row[name] for row in rows] for name in ABOUT.names} | {
        "jpg": [make_image(i) for i in range(N)]}, ABOUT.append(pa.field("jpg", pa.binary())))
    put(folder / "00000_stats.json", {"count": N, "successes": N})
    return (folder,), [f"{i:09d}" for i in range(N)], first(five)


def imagefolder_csv(folder: Path, five: list = FIVE) -> Made:
    write_csv(folder / "metadata.csv", [("file_name", "label", "text"), *(
        (name, 1, text) for name, captions in zip(put_images(folder, "images/{}.jpg"), five, strict=True)
        for text in captions)])
    return (folder,), [f"images/{i}.jpg" for i in range(N)], five


def imagefolder_jsonl(folder: Path, five: list = FIVE) -> Made:
    names = []
    for split, numbers in (("a", range(5)), ("b", range(5, N))):
        rows = []
        for i in numbers:
            put(folder / split / f"{i}.jpg", make_image(i))
            rows.append(json.dumps({"file_name": f"{i}.jpg", "caption": five[i][0]}))
            names.append(f"{split}/{i}.jpg")
        put(folder / split / "metadata.jsonl", "\n".join(rows) + "\n")
    return (folder,), names, first(five)


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def hub_parquet(folder: Path, five: list = FIVE) -> Made:
    """As Dataset.push_to_hub writes it: two files of a split, and another split."""
    schema = pa.schema([("image", STRUCT), ("caption", pa.list_(pa.string()))])
    for place, numbers in enumerate((range(5), range(5, N))):
        put_table(folder / f"data/train-0000{place}-of-00002.parquet", {
            "image": [{"bytes": make_image(i), "path": f"{i}.jpg"} for i in numbers],
            "caption": [five[i] for i in numbers]}, schema)
    put_table(folder / "data/test-00000-of-00001.parquet", {"image": [], "caption": []}, schema)
    return (f"{folder}/data/train-*.parquet",), [f"{i}.jpg" for i in range(N)], five


def plain_parquet(folder: Path, five: list = FIVE) -> Made:
    path = put_table(folder / "t.parquet", {"text": [five[i][0] for i in range(N)],
                                            "picture": pa.array(map(make_image, range(N)), pa.large_binary())})
    return (path,), [f"t.parquet#{i}" for i in range(N)], first(five)


def coco(folder: Path, five: list = FIVE) -> Made:
    """Captions stand in no order of the images."""
    names = put_images(folder / "val2017", "{:012d}.jpg")
    rows = [{"image_id": 7 * i, "id": 100 * i + j, "caption": f"{text}\n"} for i in range(N)
            for j, text in enumerate(five[i])]
    rows = rows[::2] + rows[1::2]
    path = put(folder / "annotations/captions_val2017.json", {
        "info": {}, "licenses": [], "annotations": rows,
        "images": [{"id": 7 * i, "file_name": name, "coco_url": "http://x"} for i, name in enumerate(names)]})
    captions = [[row["caption"].strip() for row in rows if row["image_id"] == 7 * i] for i in range(N)]
    return (path, "--images", folder / "val2017"), names, captions


def rows_of_images(folder: Path, five: list = FIVE) -> Made:
    path = put(folder / "train.json", [{"image": name, "caption": text} for name, captions in zip(
        put_images(folder), five, strict=True) for text in captions])
    return (path,), [f"{i}.jpg" for i in range(N)], five


def own_csv(folder: Path, five: list = FIVE) -> Made:
    names = [str(folder / name) for name in put_images(folder)]
    path = write_csv(folder / "pairs.tsv", [("filepath", "title"), *(
        (name, captions[0]) for name, captions in zip(names, five, strict=True))], delimiter="\t")
    return (path,), names, first(five)


def capitals(folder: Path, five: list = FIVE) -> Made:
    """As Windows and other programs name them."""
    names = put_images(folder, "P{}.JPG")
    for i in range(N):
        name = ("P{}.TXT", "P{}.caption", "P{}.JSON", "P{}.JPG.txt", "P{}.Caption")[i % 5].format(i)
        put(folder / name, {"captions": five[i]} if i % 5 == 2 else "\n".join(five[i]))
    return (folder,), names, five


def kaggle(folder: Path, five: list = FIVE) -> Made:
    """Kaggle's Flickr8k."""
    path = write_csv(folder / "captions.txt", [("image", "caption"), *((name, text) for name, captions in zip(
        put_images(folder / "Images"), five, strict=True) for text in captions)])
    return (path, "--images", folder / "Images"), [f"{i}.jpg" for i in range(N)], five


def image_path_rows(folder: Path, five: list = FIVE) -> Made:
    """Rows as in DOCCI, and with other names of the image."""
    keys = ("image_path", "image_file", "filepath", "image_name")
    names = put_images(folder)
    rows = [{keys[i % 4]: names[i], ("caption", "title")[i % 2]: five[i][0]} for i in range(N)]
    return (put(folder / "rows.jsonl", "\n".join(map(json.dumps, rows))),), names, first(five)


def coco_of_texts(folder: Path, five: list = FIVE) -> Made:
    """COCO's format with image_id as text, and the images in two folders."""
    names = [*put_images(folder / "a")[:5], *put_images(folder / "b")[5:]]
    for i in range(N):
        (folder / ("b" if i < 5 else "a") / names[i]).unlink()
    path = put(folder / "captions.json", {
        "annotations": [{"image_id": str(i), "caption": text} for i in range(N) for text in five[i]],
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)]})
    return (path, "--images", folder / "a", "--images", folder / "b"), names, five


MORE = (capitals, kaggle, image_path_rows, coco_of_texts)
LAYOUTS = (text_beside, json_beside, img2dataset_files, img2dataset_shards, img2dataset_parquet, imagefolder_csv,
           imagefolder_jsonl, hub_parquet, plain_parquet, coco, rows_of_images, own_csv)
