"""Files as users have them: photographs with an EXIF orientation, and tables as common programs write them.

The right pixels or rows are known before a file is written. Every reader must give just these.
"""
import csv
import gzip
import io
import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
import torch
from images import alike, caption_lines, rows_of
from odd_images import saved
from PIL import Image, features
from world import CLIP_BENCHMARK, Cases, World, check_json, each, first, png, write_csv

import open_clip_mdc
from clip_benchmark_ext.flags import Flags
from clip_benchmark_ext.job import Job
from open_clip_mdc.data import images
from open_clip_mdc.data.csv_pairs import read_part, split_csv
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.integration.csv_images import CsvImages

ORIENTATION = 0x0112
TURNS = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
         5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, -1), 7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
         8: lambda a: np.rot90(a)}
NAMES = {"JPEG": ("jpg", "jpeg", "JPG", "jfif"), "PNG": ("png", "PNG"), "WEBP": ("webp",), "TIFF": ("tif", "tiff"),
         "AVIF": ("avif",)}


def noise(rng: Random, width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))


def array(image: object) -> np.ndarray:
    return image.permute(1, 2, 0).numpy() if isinstance(image, torch.Tensor) else np.asarray(image)


# ---- photographs


def photographs(rng: Random, count: int) -> dict[str, tuple[bytes, np.ndarray]]:
    """By name a file with its note, and the pixels the right way up: those that are stored, turned by numpy."""
    found, kinds = {}, ("JPEG", "PNG", "WEBP", "TIFF", *["AVIF"] * features.check("avif"))
    for number in range(count):
        image, exif = noise(rng, rng.randrange(8, 60), rng.randrange(8, 60)), Image.Exif()
        kind, orientation = kinds[number % len(kinds)], 1 + number // len(kinds) % 8
        mode = rng.choice(("RGB", "RGB", "L", *{"JPEG": ("CMYK",), "PNG": ("P", "RGBA")}.get(kind, ())))
        exif[ORIENTATION] = orientation
        data = saved(image.convert(mode), kind, exif=exif)
        with Image.open(io.BytesIO(data)) as file:
            pixels = np.asarray(file.convert("RGB"))
        if kind in ("TIFF", "AVIF"):  # whose readers in Pillow may turn it themselves: of these what was saved
            with Image.open(io.BytesIO(saved(image.convert(mode), kind))) as file:
                pixels = np.asarray(file.convert("RGB"))
        found[f"{number:04d}-{orientation}.{rng.choice(NAMES[kind])}"] = data, TURNS[orientation](pixels)
    return found


def write_photographs(folder: Path, photos: dict[str, bytes], text: str | None = None) -> None:
    """A folder, a CSV file, and shards with texts (by default the names) and with classes, all of the same."""
    (folder / "photos").mkdir(parents=True)
    for name, data in photos.items():
        (folder / "photos" / name).write_bytes(data)
    write_csv(folder / "pairs.csv", [(folder / "photos" / name, text or name) for name in photos],
              ("filepath", "title"), "\t")
    for part in ("cls", "texts"):
        with tar_writer(folder / part / "test" / "0.tar") as writer:
            for number, (name, data) in enumerate(photos.items()):
                stem, _, suffix = name.rpartition(".")
                label = {"txt": text or name} if part == "texts" else {"cls": str(number)}
                writer.write({"__key__": stem, suffix: data, **label})
        (folder / part / "test" / "nshards.txt").write_text("1")
    for name in ("classnames.txt", "zeroshot_classification_templates.txt"):
        (folder / "cls" / name).write_text("words")
    (folder / "texts" / "dataset_type.txt").write_text("retrieval")


def for_training(shard: Path, is_train: bool, count: int) -> list[tuple]:
    """Images and texts as OpenCLIP's pipeline reads them."""
    from open_clip_train import data
    args = Namespace(train_data=str(shard), val_data=str(shard), train_num_samples=count, val_num_samples=None, rank=0,
                     train_data_upsampling_factors=None, seed=0, world_size=1, workers=0, batch_size=1, device="cpu")
    info = data.get_wds_dataset(args, images_to_tensor, is_train, tokenizer=lambda text: [text])
    return [(image[0], text) for image, (text,) in info.dataloader]


def images_to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def benchmark(root: Path, task: str):
    args = Namespace(dataset="wds/x", dataset_root=str(root), task=task, language="en", batch_size=1,
                     annotation_file=None, custom_template_file=None, custom_classname_file=None, wds_cache_dir=None)
    return Job(args, Flags(), {}, root).build("test", np.asarray)


def seen_by(folder: Path, names: list[str]) -> dict[str, Callable[[], dict]]:
    """By reader {name: picture}."""
    shard, photos = folder / "texts" / "test" / "0.tar", folder / "photos"
    rows = CsvImages(str(folder / "pairs.csv"), np.asarray, "filepath", "title", tokenizer=lambda texts: texts)
    return {
        "file": lambda: {name: images.open_image(photos / name) for name in names},
        "memory": lambda: {name: images.open_image(Image.open(photos / name)) for name in names},
        "selection": lambda: {name: images.decode_image(photos / name) for name in names},
        "csv": lambda: {name: image for image, name in rows},
        "shard": lambda: {source.text: images.open_image(source.source) for source in images.read_images([shard])},
        "pairs": lambda: {name: image for image, name in images.read_pairs([str(shard)], np.asarray, lambda t: [t])},
        "training": lambda: {name: image for image, name in for_training(shard, True, len(names))},
        "validation": lambda: {name: image for image, name in for_training(shard, False, len(names))},
        "classification": lambda: {names[k]: image for image, k in benchmark(folder / "cls", "linear_probe")},
        "captioning": lambda: {name: image for image, (name,), *_ in benchmark(folder / "texts", "captioning")},
    }


def turned(world: World) -> Cases:
    """World's number of photographs by every reader, pixel by pixel."""
    folder = world.fresh("people-photographs")
    photos = photographs(world.rng("people-photographs"), world.args.people)
    write_photographs(folder, {name: data for name, (data, _) in photos.items()})
    open_clip_mdc.register(training=True)
    readers, seen = seen_by(folder, list(photos)), {}

    def check(case: tuple[str, str]) -> str | None:
        reader, name = case
        if reader not in seen:
            seen[reader] = readers[reader]()
        found = seen[reader].get(name)
        return "is missing" if found is None else None if np.array_equal(array(found), photos[name][1]) else \
            f"another picture, of {array(found).shape}"
    yield from each(world, [(f"{reader}: {name}", (reader, name)) for reader in readers for name in photos], check,
                    folder)


def turned_by_commands(world: World) -> Cases:
    """caption, embed, score, prepare and clip_benchmark: what they make of the upright copies as PNG."""
    folder, photos = world.fresh("people-turned"), photographs(world.rng("people-turned"), max(40, world.args.broken))
    for kind, files in (("turned", {name: data for name, (data, _) in photos.items()}), ("upright", {
            f"{Path(name).stem}.png": png(Image.fromarray(pixels)) for name, (_, pixels) in photos.items()})):
        write_photographs(folder / kind, files, "a red circle")
    found = {}
    for kind in ("turned", "upright"):
        shard = f"{kind}/texts/test/0.tar"
        for name, argv in (("caption", (f"{kind}/photos", "--length", 4, "--out", f"{kind}.jsonl")),
                           ("caption, shard", (shard, "--length", 4, "--out", f"{kind}-shard.jsonl")),
                           ("embed", (shard, "--out", f"{kind}-e")),
                           ("score", ("--pairs", f"{kind}/pairs.csv", "--blind-images", world.images, "--out",
                                      f"{kind}-s"))):
            if problem := world.tool(name.partition(",")[0], *argv, cwd=folder, timeout=1200).problem(0):
                yield f"{name}: {kind}", problem
                return
            out, rows = folder / str(argv[-1]), {}
            for path in [out] if out.is_file() else out.glob("*.parquet"):
                rows |= caption_lines(path) if out.is_file() else rows_of(path)
            found[name, kind] = rows
        ended = world.call(CLIP_BENCHMARK, "eval", "--model", "mdc", "--pretrained", world.run, "--num_workers", 0,
                           "--no_amp", "--quiet", "--dataset", "wds/x", "--dataset_root", folder / kind / "texts",
                           "--task", "captioning", "--caption_length", 3, "--output", f"{kind}.json", cwd=folder)
        yield f"clip_benchmark: {kind}", first(ended.problem(0), check_json(folder))
        found["clip_benchmark", kind] = {"all": json.loads((folder / f"{kind}.json").read_text())["metrics"]}
    for name in dict.fromkeys(name for name, _ in found):
        own, upright = found[name, "turned"], found[name, "upright"]
        for key in upright:
            yield f"{name}: {key}", None if alike(own.get(key), upright[key]) else \
                f"{str(own.get(key))[:100]}, its upright copy {str(upright[key])[:100]}"


# ---- tables


WORDS = ("a red circle", "None", "NA", "N/A", "nan", "null", "007", "1e5", "-", "caf\u00e9 \u2615", "\u72ac", "TRUE",
         "=1+1", "it's", "#5", "a\\b", "\u2028", "inf")
MARKS = ('"', ",", ";", "\t", "\n", '"stop"', " 12\" wide", "'", "  ")


def caption(rng: Random) -> str:
    return (rng.choice(WORDS) + "".join(rng.choice((rng.choice(MARKS), f" {rng.choice(WORDS)}")) for _ in range(
        rng.choice((0, 0, 1, 2, 5))))).strip()


def comma(rows: list[tuple], rng: Random, **options) -> str:
    stream = io.StringIO()
    options |= {"delimiter": rng.choice(",;\t"), "lineterminator": rng.choice(("\n", "\r\n"))}
    csv.writer(stream, **options).writerows(rows)
    return stream.getvalue()


def r_table(rows: list[tuple], rng: Random) -> str:
    """R's write.table and write.csv, all texts in quotes."""
    escape = rng.choice(('\\"', '""'))
    separator = rng.choice("\t,") if escape == '""' else "\t"
    rows = [[cell.replace("\\", "") for cell in row] for row in rows]  # which R writes as it is
    return "".join(separator.join('"{}"'.format(cell.replace('"', escape)) for cell in row) + "\n" for row in rows)


def pandas_table(rows: list[tuple], rng: Random) -> str:
    import pandas
    return pandas.DataFrame(rows[1:], columns=rows[0]).to_csv(index=rng.random() < 0.5, sep=rng.choice(",\t;"))


PROGRAMS = {"csv": comma, "Excel": comma, "all in quotes": lambda rows, rng: comma(rows, rng, quoting=csv.QUOTE_ALL),
            "R": r_table, "pandas": pandas_table}
ENCODINGS = {"csv": ("utf-8",), "Excel": ("utf-8-sig", "utf-16", "utf-16-be")}
DAMAGES = ("cut", "an open quote", "Latin-1", "a cell too many", "a cell too few", "zeros", "a row of another table")


def table(rng: Random, damage: bool) -> tuple[str, bytes, list[tuple], bool]:
    """Return the kind of a table, its file, its rows, and whether it is packed."""
    program = rng.choice(list(PROGRAMS))
    rows = [(f"{rng.choice(('', 'in/', 'v1.'))}{i}.{rng.choice(('jpg', 'png'))}",
             text if (text := caption(rng)).strip() else "a dog") for i in range(
        rng.randrange(1, 9))]
    if program == "R":
        rows = [(image, text.replace("\\", "")) for image, text in rows]
    text = PROGRAMS[program]([rng.choice((("image", "caption"), ("filepath", "title"))), *rows], rng)
    encoding, packed = rng.choice(ENCODINGS.get(program, ("utf-8", "utf-8-sig"))), rng.random() < 0.2
    data = (b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding)
    if not damage:
        return f"{program}, {encoding}{', gzip' * packed}", gzip.compress(data) if packed else data, rows, packed
    kind, place = rng.choice(DAMAGES), rng.randrange(len(data))
    data = {"cut": data[:place], "an open quote": data + b'c.jpg,"open\n', "Latin-1": data + b"c.jpg,caf\xe9\n",
            "a cell too many": data + b"c.jpg,a,b\tc;d\n", "a cell too few": data + b"c.jpg\n",
            "zeros": data[:place] + bytes(9) + data[place:],
            "a row of another table": data + b"\n\nfilepath\ttitle\nc.jpg\td\n"}[kind]
    return f"{program}, {encoding}, {kind}", data, rows, False


def tables(world: World) -> Cases:
    """Read World's number of tables, whole and damaged.

    Training and score must read the rows that were written, or both refuse the file in a line that names it.
    """
    folder, rng = world.fresh("people-tables"), world.rng("people-tables")

    def check(case: tuple) -> str | None:
        number, damage, (_, data, rows, packed) = case
        path, found, said = folder / f"{number}.csv{'.gz' * packed}", [], []
        path.write_bytes(data)
        for read in (lambda: [(row.image, row.caption) for part in split_csv(path, 3) for row in read_part(part)],
                     lambda: (lambda d: list(zip(d.images, d.captions, strict=True)))(
                         CsvImages(str(path), None, img_key="filepath", caption_key="title", sep="\t"))):
            try:
                found.append(read())
            except ValueError as problem:
                said.append(str(problem))
        if said:
            clear = len(said) == 2 and all(path.name in line and "\n" not in line for line in said)
            return f"refused: {said[0][:300]}" if not damage or not clear else None
        return "two readers, two tables" if found[0] != found[1] else f"{found[0]!r:.200}, not {rows!r:.200}" if (
            found[0] != rows and not damage) else None
    items = []
    for number in range(world.args.people):
        made = table(rng, damage := number % 3 == 2)
        items.append((f"{number} {made[0]}", (number, damage, made)))
    yield from each(world, items, check, folder)


def tables_by_commands(world: World) -> Cases:
    """score --pairs and training of tables that programs wrote: a row for each of theirs."""
    rng = world.rng("people-rows")
    for number in range(world.args.broken):
        folder, (name, data, rows, packed) = world.fresh("people-rows"), table(rng, False)
        path = folder / f"t.csv{'.gz' * packed}"
        (folder / "in").mkdir()
        for i, (image, _) in enumerate(rows):
            (folder / image).write_bytes(world.samples[i][0])
        path.write_bytes(data)
        ended = world.tool("score", "--pairs", path, "--blind-images", world.images, "--out", "s", cwd=folder)
        found = sorted((row["key"], row["caption"]) for out in (folder / "s").glob("*.parquet")
                       for row in pq.read_table(out).to_pylist())
        wanted = sorted((image, " ".join(text.split())) for image, text in rows)
        yield f"{number} score: {name}", first(ended.problem(0), None if found == wanted else f"rows {found!r:.200}")
        ended = world.train("--train-data", path, "--dataset-type", "csv", "--batch-size", len(rows), "--epochs", 1,
                            cwd=folder)
        yield f"{number} training: {name}", ended.problem(0)


PARTS = {"people: photographs": turned, "people: photographs by commands": turned_by_commands,
         "people: tables": tables, "people: tables by commands": tables_by_commands}
