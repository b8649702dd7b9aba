"""Send broken and odd images through caption, embed, score, prepare, training and the benchmark.

Pillow alone (numpy for 16-bit grey) says whether an image can be decoded. Images that can are also saved as plain PNGs,
and both must give the same rows.
"""
import json
import math
from pathlib import Path

import pyarrow.parquet as pq
from odd_images import BOMB, LONGEST, decoded, is_stored, odd_images, same_pixels, special
from world import (
    CLIP_BENCHMARK,
    MDC,
    Cases,
    World,
    check_json,
    first,
    png,
    strict_json,
    write_csv,
    write_shard,
)

from open_clip_mdc.data.shards import read_samples, tar_writer


class Images:
    """The odd images as files and as a shard, with the results that are right.

    Attributes: `good` and `bad` are names of images that Pillow can and cannot decode. Very large ones are in neither,
    as they may be read or refused.
    """

    def __init__(self, world: World, name: str):
        self.world, self.folder = world, world.fresh(name)
        self.odd = odd_images(world)
        plain = {odd.name: decoded(odd.data) for odd in self.odd}
        too_long = {name for name, image in plain.items() if image and max(image.size) > LONGEST * min(image.size)}
        huge = {name for name, image in plain.items() if image and image.width * image.height > BOMB}
        self.good = {name for name, image in plain.items() if image} - too_long - huge
        self.bad = {name for name, image in plain.items() if not image} | too_long - huge
        for kind in ("odd", "plain"):
            (self.folder / kind).mkdir()
        self.files = {}
        for odd in self.odd:
            self.files[odd.name] = self.folder / "odd" / f"{odd.name}.{odd.suffix}"
            self.files[odd.name].write_bytes(odd.data)
            if odd.name in self.good:
                (self.folder / "plain" / f"{odd.name}.png").write_bytes(png(plain[odd.name]))
        self.shard = self.folder / "odd.tar"
        with tar_writer(self.shard) as writer:
            for odd in self.odd:
                writer.write({"__key__": odd.name, odd.suffix: odd.data, "txt": "a red circle",
                              "json": json.dumps({"caption": "a red circle", "filename": odd.name})})
        gs = self.folder / "bin" / "gs"  # what Pillow would start for an EPS
        gs.parent.mkdir()
        gs.write_text(f"#!/bin/sh\ntouch {self.folder}/started\necho 10.0\n")
        gs.chmod(0o755)

    def call(self, tool, *argv, **options):
        import os
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return tool(*argv, cwd=self.folder, timeout=1200, prepare=lambda: os.environ.update(PATH=path), **options)

    def started(self) -> Cases:
        yield "another program", "Ghostscript was started" if (self.folder / "started").exists() else None

    def compare(self, command: str, found: dict[str, object], plain: dict[str, object]) -> Cases:
        """Yield a case for each image: if it can be read, its row equals that of the plain copy, else it has none."""
        for odd in self.odd:
            name, problem = odd.name, None
            if name in self.bad and name in found:
                problem = "it was read"
            elif name in self.good and not alike(found.get(name), plain.get(name)):
                problem = f"{str(found.get(name))[:100]}, its plain copy {str(plain.get(name))[:100]}"
            yield f"{command}: {name}", problem


def caption_lines(path: Path) -> dict[str, tuple]:
    rows = [strict_json(line) for line in path.read_text().splitlines()]
    found = {Path(row["image"].rpartition("::")[2]).stem: (row["caption"], [t["step"] for t in row["tokens"]])
             for row in rows}
    assert len(found) == len(rows), "an image has two lines"
    return found


def alike(a: object, b: object) -> bool:
    """Equal but for how batches round."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, abs_tol=1e-3)
    if isinstance(a, dict) and isinstance(b, dict):
        return alike(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def rows_of(path: Path) -> dict[str, object]:
    """{key: the rest of the row} of a table."""
    rows = pq.read_table(path).to_pylist()
    found = {Path(row.pop("key")).stem: list(row.values()) for row in rows}
    assert len(found) == len(rows), "an image has two rows"
    return found


def caption(world: World) -> Cases:
    images = Images(world, "images-caption")
    for source in ("odd", "odd.tar", "plain"):
        ended = images.call(world.tool, "caption", source, "--out", f"{source}.jsonl", "--html", f"{source}.html",
                            "--length", 4)
        bad = images.bad if source != "plain" else ()
        yield f"{source}: the command", first(ended.problem(1 if bad else 0), check_json(images.folder))
    plain = caption_lines(images.folder / "plain.jsonl")
    for source in ("odd", "odd.tar"):
        yield from images.compare(source, caption_lines(images.folder / f"{source}.jsonl"), plain)
    yield from images.started()


def tables(world: World) -> Cases:
    """Run caption, embed and score --pairs, the latter also on a CSV file in which one image is missing."""
    images = Images(world, "images-tables")
    write_shard(images.folder / "plain.tar", [])
    with tar_writer(images.folder / "plain.tar") as writer:
        for path in sorted((images.folder / "plain").iterdir()):
            writer.write({"__key__": path.stem, "png": path.read_bytes(), "txt": "a red circle"})
    for kind in ("odd", "plain"):
        files = sorted((images.folder / kind).iterdir())
        write_csv(images.folder / f"{kind}.csv", [(file, "a red circle") for file in [
            *files, images.folder / "there-is-none.png"]])
    blind = ("--blind-images", world.images)
    for name, argv, sources in (("caption", ("--length", 4), ("{}.tar", "{}")), ("embed", (), ("{}.tar", "{}")),
                                ("score", blind, ("{}.tar", "{}.csv"))):
        for source in sources:
            found = {}
            for kind in ("odd", "plain"):
                out, path = f"{name}-{source.format(kind)}".replace(".", "-"), source.format(kind)
                ended = images.call(world.tool, name, *(("--pairs",) if name == "score" else ()), path, *argv, "--out",
                                    out)
                skips = path.endswith(".csv") or kind == "odd" and images.bad
                if problem := ended.problem(1 if skips else 0):
                    yield f"{name} {path}", problem
                    break
                found[kind] = {}
                for table in (images.folder / out).glob("*.parquet"):
                    found[kind] |= rows_of(table)
            if len(found) == 2:
                yield from images.compare(f"{name} {source.format('odd')}", found["odd"], found["plain"])
    files = [images.files[odd.name] for odd in images.odd]
    (images.folder / "c.txt").write_text("a red circle\n")
    ended = images.call(world.tool, "score", "--images", *files, "--captions", "c.txt", *blind, "--out", "s.csv")
    yield "score --images", first(ended.problem(1 if images.bad else 0), None if (
        images.folder / "s.csv").exists() else "no file is there")
    yield from images.started()


def prepare(world: World) -> Cases:
    """Images are copied byte for byte (other formats as PNG of the same pixels) or listed as left out."""
    images = Images(world, "images-prepare")
    rows = [{"filename": images.files[odd.name].name, "split": "train", "sentences": [{"raw": "a red circle"}]}
            for odd in images.odd]
    (images.folder / "karpathy.json").write_text(json.dumps({"dataset": "coco", "images": rows}))
    for name, argv in (("shards", ("shards", "--train", "odd.tar", "--captions-key", "caption")),
                       ("coco", ("coco", "--images", "odd", "--annotations", "karpathy.json"))):
        ended = images.call(world.call, MDC, "prepare", *argv, "--out", "refused")
        yield f"{name}: without --skip-broken", first(ended.problem(1 if images.bad else 0), "it was written" if
                                                      images.bad and (images.folder / "refused").exists() else None)
        ended = images.call(world.call, MDC, "prepare", *argv, "--out", name, "--skip-broken")
        if problem := ended.problem(0):
            yield name, problem
            continue
        found = {}
        for sample in read_samples(str(images.folder / name / "train" / "00000.tar")):
            data = next(sample[suffix] for suffix in ("jpg", "png", "webp") if suffix in sample)
            found[Path(json.loads(sample["json"])["filename"]).stem if name == "coco" else
                  json.loads(sample["json"])["filename"]] = data
        left_out = (images.folder / name / "left_out.txt").read_text().splitlines() if (
            images.folder / name / "left_out.txt").exists() else []
        for odd in images.odd:
            listed = sum(odd.name in line for line in left_out)
            same = found.get(odd.name) == odd.data or odd.name in found and not is_stored(odd.data) and (
                same_pixels(found[odd.name], odd.data))
            unread = decoded(odd.data) is None
            yield f"{name}: {odd.name}", "written" if unread and same else (
                f"written {same}, listed {listed} times" if same + listed != 1 else None)
    yield from images.started()


def train(world: World) -> Cases:
    """Train.

    Over shards broken images are left out. Over a CSV file they end training in one line that names the file.
    """
    images = Images(world, "images-train")
    wds = ("--dataset-type", "webdataset", "--epochs", 1, "--batch-size", 4)
    ended = images.call(world.train, *wds, "--train-data", images.shard, "--train-num-samples", len(images.good),
                        name="wds")
    yield "webdataset", ended.problem(0)
    bad = [odd for odd in images.odd if odd.name in images.bad]
    write_shard(images.folder / "bad.tar", [(odd.suffix, odd.data, "a red circle") for odd in special()[:5]])
    ended = images.call(world.train, *wds, "--train-data", images.folder / "bad.tar", "--train-num-samples", 8,
                        name="none")
    yield "a shard without an image that can be read", ended.problem(1)
    for name, some in (("good", sorted(images.good)), ("bad", [odd.name for odd in bad])):
        for number, workers in enumerate((0, 2)):
            write_csv(images.folder / f"{name}.csv", [(images.files[odd], "a red circle") for odd in some],
                      ("filepath", "title"), "\t")
            ended = images.call(world.train, "--train-data", images.folder / f"{name}.csv", "--epochs", 1,
                                "--batch-size", 4, "--workers", workers, name=f"{name}{number}")
            named = any(str(images.files[odd]) in ended.err for odd in some)
            yield f"csv, {name}, {workers} workers", first(
                ended.problem(0 if name == "good" else 1) if some else None,
                "names no file" if some and name == "bad" and not named else None)
    yield from images.started()


def evaluate(world: World) -> Cases:
    """Run captioning, a probe and a selection. They give a result if all images can be read, else one line."""
    images = Images(world, "images-eval")
    common = ("--model", "mdc", "--pretrained", world.run, "--num_workers", 0, "--no_amp", "--quiet")
    for kind in ("good", "all"):
        some = [odd for odd in images.odd if odd.name in images.good or kind == "all"]
        for split in ("train", "test"):
            folder = images.folder / kind / split
            folder.mkdir(parents=True)
            (folder / "nshards.txt").write_text("1")
            with tar_writer(folder / "0.tar") as writer:
                for i, odd in enumerate(some):
                    writer.write({"__key__": odd.name, odd.suffix: odd.data, "txt": "a red circle", "cls": str(i % 3)})
        (images.folder / kind / "classnames.txt").write_text("a\nb\nc")
        (images.folder / kind / "zeroshot_classification_templates.txt").write_text("{c}")
        crepe = {str(i): {"filename": images.files[odd.name].name, "caption": "a red circle", "negative_caption": "a"}
                 for i, odd in enumerate(some)}
        (images.folder / kind / "val2017").symlink_to(images.folder / "odd")
        (images.folder / kind / "swap_obj.json").write_text(json.dumps(crepe))
        wanted = 0 if kind == "good" or len(some) == len(images.good) else 1
        for task, dataset in (("captioning", "wds/x"), ("linear_probe", "wds/x"),
                              ("image_caption_selection", "sugar_crepe/swap_obj")):
            ended = images.call(world.call, CLIP_BENCHMARK, "eval", *common, "--dataset", dataset, "--dataset_root",
                                images.folder / kind, "--task", task, "--output", f"{kind}-{task}.json",
                                "--feature_root", "features")
            yield f"{task}, {kind}", first(ended.problem(wanted), check_json(images.folder))
    yield from images.started()


PARTS = {"images: caption": caption, "images: caption, embed, score in tables": tables, "images: prepare": prepare,
         "images: training": train, "images: clip_benchmark": evaluate}
