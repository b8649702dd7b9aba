"""Shards and folders as users have them: keys with dots, several captions, images of any format under any name.

The samples are known before they are written. Every reader gives each of them, with its own caption and picture, or
names what no reader can read.
"""
import json
from pathlib import Path
from random import Random

import numpy as np
import pyarrow.parquet as pq
from images import caption_lines
from odd_images import MODES, READ, decoded, saved
from people import array, benchmark, for_training, noise
from tars import make, member
from world import MDC, Cases, World, check_json, each, first

import open_clip_mdc
from open_clip_mdc.cli.score import pair_captions
from open_clip_mdc.data import images
from open_clip_mdc.data.paths import IMAGE_SUFFIXES, UNREADABLE_FILES, find_images
from open_clip_mdc.data.shards import CAPTION_SEPARATOR, read_samples

PARTS_OF_KEYS = ("v1", "0", "V2", "jpg", "2024-01-02", "com", "x y", "ä", "_", "crop", "png", "tar")
STEMS = ("img", "cat", "www", "a b", "犬", "IMG_0001", "in/photo", "d.ir/photo")
WORDS = ("a red circle", "two stars", "a café", "None", "a \"stop\" sign", "12, a; b", "a star left of a square")
BESIDE = {"json": b"{}", "depth.png": None, "cls": b"3", "mask.PNG": None, "npy": b"no array", "url": b"http://x"}


def picture(rng: Random, foreign: bool) -> tuple[str, bytes]:
    """Suffix and file, of a format that others may not read."""
    kinds = {"JPEG": ("jpg", "jpeg", "JPG"), "PNG": ("png", "PNG"), "WEBP": ("webp",)} | ({
        "GIF": ("gif",), "TIFF": ("tif", "TIFF"), "BMP": ("bmp",), "JPEG2000": ("jp2",), "PPM": ("ppm",)}
        if foreign else {})
    kind = rng.choice(list(kinds))
    return rng.choice(kinds[kind]), saved(noise(rng, rng.randrange(8, 40), rng.randrange(8, 40)), kind)


def drawn(rng: Random) -> tuple[dict[str, tuple[bytes, list[str]]], list[tuple[str, bytes]]]:
    """Samples of a shard, {key: (image, captions)}, and its members in the order of the archive.

    Samples whose names are alike up to the first dot stand together, as any sorted archive has them.
    """
    how, wanted, members = rng.choice(("one", "joined", "lines")), {}, []
    for stem in rng.sample(STEMS, rng.randrange(1, 5)):
        keys = {".".join((stem, *rng.choices(PARTS_OF_KEYS, k=rng.choice((0, 0, 1, 1, 2))))) for _ in range(
            rng.randrange(1, 4))}
        for key in sorted(keys):
            texts = rng.sample(WORDS, 1 if how == "one" else rng.randrange(1, 4))
            suffix, data = picture(rng, True)
            wanted[key] = data, texts
            text = ("\n" if how == "lines" else CAPTION_SEPARATOR).join(texts) + rng.choice(("", "\n"))
            own = [(f"{key}.{suffix}", data), (f"{key}.{rng.choice(('txt', 'TXT'))}", text.encode(
                rng.choice(("utf-8", "utf-8-sig"))))]
            beside = rng.sample(list(BESIDE), rng.choice((0, 0, 1, 2)))
            own += [(f"{key}.{name}", saved(noise(rng, 8, 8), "PNG") if BESIDE[name] is None else BESIDE[name])
                    for name in beside]
            rng.shuffle(own)
            members += own
            folder, _, name = key.rpartition("/")
            if rng.random() < 0.2:  # what macOS adds
                members.append((f"{folder}{'/' * bool(folder)}._{name}.jpg", b"\0\5\x16\7"))
    return wanted, members


def same(found: object, data: bytes) -> bool:
    return np.array_equal(array(found), np.asarray(decoded(data)))


def one_text(texts: list[str], members: list[tuple]) -> str:
    """Return the caption that validation reads: the first of several that are joined. Lines alone are one text."""
    joined = any(CAPTION_SEPARATOR.encode() in data for name, data in members if name.lower().endswith(".txt"))
    return texts[0] if joined or len(texts) == 1 else "\n".join(texts)


def shards(world: World) -> Cases:
    """World's number of shards through the readers of tools, training and the benchmark."""
    folder, rng = world.fresh("samples-shards"), world.rng("samples-shards")
    open_clip_mdc.register(training=True)
    (folder / "test").mkdir()
    (folder / "test" / "nshards.txt").write_text("1")
    (folder / "dataset_type.txt").write_text("retrieval")
    path = folder / "test" / "0.tar"

    def check(case: tuple[dict, list]) -> str | None:
        wanted, members = case
        path.write_bytes(make([member(*m) for m in members]))
        texts = {key: one_text(own, members) for key, (_, own) in wanted.items()}
        read = list(images.read_images([path]))
        named = {source.name.partition("::")[2]: source for source in read}
        if named.keys() != wanted.keys() or len(read) != len(wanted):
            return f"samples {sorted(named)}, not {sorted(wanted)}"
        for key, (data, own) in wanted.items():
            said = [" ".join(caption.split()) for caption in own]
            found = pair_captions(named[key].text)
            if found != (said if CAPTION_SEPARATOR in named[key].text else [" ".join(said)]):
                return f"captions {found} of {key}"
            if not same(images.open_image(named[key].source), data):
                return f"another picture of {key}"
        pictures = {key: np.asarray(decoded(data)) for key, (data, _) in wanted.items()}

        def paired(pairs: list[tuple], who: str, drawn: bool = False) -> str | None:
            """Check that each sample comes once, image with text. Training may draw any of several captions."""
            left = dict(pictures)
            for image, text in pairs:
                key = next((key for key, own in left.items() if np.array_equal(array(image), own)), None)
                allowed = wanted[key][1] if key and drawn else []
                if key is None or text.strip() not in [texts[key], *allowed]:
                    return f"{who}: {key} with {text!r}"
                del left[key]
            return f"{who} misses {sorted(left)}" if left else None
        return first(
            paired(list(images.read_pairs([str(path)], np.asarray, lambda text: [text])), "pairs"),
            paired(for_training(path, False, len(wanted)), "validation"),
            paired(for_training(path, True, len(wanted)), "training", drawn=True),
            None if len(list(benchmark(folder, "captioning"))) == len(wanted) else "captioning misses some")
    yield from each(world, [(f"{i}", drawn(rng)) for i in range(world.args.people)], check, folder)


def shards_by_commands(world: World) -> Cases:
    """caption, score, prepare and training: a row for each sample, a caption for each of its own."""
    rng = world.rng("samples-commands")
    for number in range(world.args.broken):
        folder, (wanted, members) = world.fresh("samples-commands"), drawn(rng)
        path = folder / "0.tar"
        path.write_bytes(make([member(*m) for m in members]))
        lines = not any(CAPTION_SEPARATOR.encode() in data for name, data in members if name.lower().endswith(".txt"))
        ended = world.tool("caption", path, "--length", 2, "--out", "c.jsonl", cwd=folder)
        problem = first(ended.problem(0), check_json(folder))
        rows = [] if problem else [json.loads(line) for line in (folder / "c.jsonl").read_text().splitlines()]
        keys = sorted(row["image"].partition("::")[2] for row in rows)
        yield f"{number} caption", problem or (None if keys == sorted(wanted) else "other samples")
        ended = world.tool("score", "--pairs", path, "--blind-images", world.images, "--out", "s", cwd=folder)
        found = sorted((row["key"], row["caption"]) for table in (folder / "s").glob("*.parquet")
                       for row in pq.read_table(table).to_pylist())
        right = sorted((key, text) for key, (_, own) in wanted.items() for text in ([" ".join(own)] if lines else own))
        yield f"{number} score", first(ended.problem(0), None if found == right else f"{found!r:.200}")
        ended = world.call(MDC, "prepare", "shards", "--train", path, "--out", "p", cwd=folder)
        problem = ended.problem(0)
        if not problem:
            kept = sorted(sample["txt"].decode().split(CAPTION_SEPARATOR) for sample in read_samples(
                str(folder / "p" / "train" / "00000.tar")))
            problem = None if kept == sorted(own for _, own in wanted.values()) else f"captions {kept!r:.200}"
        yield f"{number} prepare", problem
        ended = world.train("--train-data", path, "--dataset-type", "webdataset", "--train-num-samples", len(wanted),
                            "--batch-size", len(wanted), "--epochs", 1, cwd=folder)
        yield f"{number} training", ended.problem(0)


# ---- folders


def foreign(rng: Random, number: int) -> tuple[str, bytes]:
    """Name and file: any format and mode that Pillow writes, under a name that may say something else."""
    while True:
        kind, mode = rng.choice((*READ, "TGA", "ICO", "SGI", "PCX", "EPS")), rng.choice(MODES)
        try:
            data = saved(noise(rng, rng.randrange(8, 40), rng.randrange(8, 40)).convert(mode), kind)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        suffix = rng.choice((*IMAGE_SUFFIXES[:5], *IMAGE_SUFFIXES, *(s[1:] for s in UNREADABLE_FILES), "", "JPG",
                             "jpg_large", "jpg:orig"))
        return f"{rng.choice(('', 'in/', 'a.b/'))}{number:04d}{'.' * bool(suffix)}{suffix}", data


def folders(world: World) -> Cases:
    """World's number of images in a folder: each that Pillow reads is found and is its picture, the others are named
    where their names are those of images."""
    folder, rng = world.fresh("samples-folder"), world.rng("samples-folder")
    files = dict(foreign(rng, number) for number in range(world.args.people))
    for name, data in files.items():
        (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "photos" / name).write_bytes(data)
    listed = set(find_images([str(folder / "photos")]))

    def check(name: str) -> str | None:
        path, right = folder / "photos" / name, decoded(files[name])
        claims = path.suffix.lower()[1:] in IMAGE_SUFFIXES or path.suffix.lower() in UNREADABLE_FILES
        if path not in listed:
            return "is not found" if right or claims else None
        try:
            found = images.open_image(path)
        except ValueError as problem:
            return f"refused: {problem}" if right else None if name in str(problem) else f"says {problem}"
        return "was read" if right is None else None if np.array_equal(array(found), np.asarray(right)) else \
            "another picture"
    yield from each(world, [(name, name) for name in files], check, folder)
    good = {str(Path("photos", name)) for name, data in files.items() if decoded(data)}
    ended = world.tool("caption", "photos", "--length", 2, "--out", "c.jsonl", cwd=folder, timeout=1200)
    yield "caption", first(ended.problem(1 if len(good) < len(listed) else 0), None if len(
        caption_lines(folder / "c.jsonl")) == len(good) else "other images")


PARTS = {"samples: shards": shards, "samples: shards by commands": shards_by_commands, "samples: folders": folders}
