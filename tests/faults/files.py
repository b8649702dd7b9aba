"""Broken checkpoints, JSON, tables, journals and kept features: a right result or one line, never a wrong number."""
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from world import (
    CLIP_BENCHMARK,
    JUDGE,
    MDC,
    TRAIN,
    Cases,
    World,
    check_json,
    first,
    train_flags,
    tree,
    unlike,
    write_shard,
)

from open_clip_mdc.data.files import new_folder


def cut(data: bytes, rng: Random) -> bytes:
    return data[:rng.randrange(len(data))]


def rot(data: bytes, rng: Random) -> bytes:
    """One bit is another."""
    data, place = bytearray(data), rng.randrange(len(data))
    data[place] ^= 1 << rng.randrange(8)
    return bytes(data)


def damage(data: bytes, rng: Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Half of them cut off, half with a changed bit."""
    for i in range(count):
        yield (f"cut {i}", cut(data, rng)) if i % 2 else (f"bit rot {i}", rot(data, rng))


# ---- checkpoints


class Runs:
    """A reduce method that runs a program when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def broken_checkpoints(world: World, folder: Path) -> Iterator[tuple[str, bytes]]:
    source = world.run / "checkpoints" / "epoch_1.pt"
    state = torch.load(source, weights_only=True)
    name = "text.output.weight"

    def saved(content: object) -> bytes:
        torch.save(content, folder / "saved.pt")
        return (folder / "saved.pt").read_bytes()

    def changed(value: object) -> bytes:
        return saved({"state_dict": {**state["state_dict"], name: value}})
    weight = state["state_dict"][name]
    yield "nothing", b""
    yield "text", b"no checkpoint"
    yield "zeros", bytes(10_000)
    yield "NaN", changed(torch.full_like(weight, float("nan")))
    yield "one infinity", changed(weight.flatten().index_fill(0, torch.tensor([7]), float("inf")).view_as(weight))
    yield "another shape", changed(weight[:, :-1])
    yield "a text for a weight", changed("weights")
    yield "no weights", saved({"state_dict": {}})
    yield "a list", saved([1, 2])
    yield "a program", saved({"state_dict": Runs(folder / "started")})
    yield from damage(source.read_bytes(), world.rng("checkpoints"), world.args.broken)


def checkpoints(world: World) -> Cases:
    """caption, clip_benchmark, --pretrained and --resume of training."""
    folder = world.fresh("checkpoints")
    shutil.copytree(world.run, folder / "whole")
    images = world.images

    def captions(run: str):
        return world.call(MDC, "caption", "--pretrained", run, "--device", "cpu", "--workers", 0, images, "--limit", 4,
                          "--out", "out.jsonl", cwd=folder)
    yield "whole", captions("whole").problem(0)
    expected = (folder / "out.jsonl").read_bytes()
    for name, data in broken_checkpoints(world, folder):
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(world.run, folder / "run")
        path = folder / "run" / "checkpoints" / "epoch_1.pt"
        path.write_bytes(data)
        (folder / "out.jsonl").unlink(missing_ok=True)
        ended = captions("run")
        harmless = name.startswith(("bit rot", "cut"))  # a byte that means nothing may be another
        right = ended.code == 0 and harmless and (folder / "out.jsonl").read_bytes() == expected
        yield f"caption: {name}", None if right else ended.problem(1)
        if not name.startswith("cut") or name.endswith("1"):
            ended = world.call(CLIP_BENCHMARK, "eval", "--model", "mdc", "--pretrained", folder / "run", "--dataset",
                               "wds/probe", "--dataset_root", world.scenes / "probe", "--task", "linear_probe",
                               "--feature_root", "features", "--output", "e.json", "--num_workers", 0, "--no_amp",
                               "--quiet", cwd=folder)
            yield f"clip_benchmark: {name}", ended.problem(0 if right else 1)
            for flag in ("--pretrained", "--resume"):
                ended = world.call(TRAIN, *train_flags("--train-data", world.csv, "--batch-size", 24, "--epochs", 1,
                                                       flag, path, logs=folder / "logs", name=f"{name}{flag}"),
                                   cwd=folder)
                yield f"training {flag}: {name}", ended.problem(0 if right and flag == "--pretrained" else None)
    yield "another program", "a checkpoint started it" if (folder / "started").exists() else None


def resumed(world: World) -> Cases:
    """A training whose newest checkpoint, or whose rows of validation, broke off: the weights of the unbroken run,
    or one line that names the file."""
    from kill import checkpoints as result
    folder, rng = world.fresh("resumed"), world.rng("resumed")
    argv = train_flags("--train-data", world.csv, "--val-data", world.csv, "--batch-size", 24, "--epochs", 3,
                       "--resume", "latest", logs=Path("out"))
    (folder / "whole").mkdir()
    yield "undisturbed", world.call(TRAIN, *argv, cwd=folder / "whole").problem(0)
    expected = result(folder / "whole")
    for i in range(max(2, world.args.broken // 4)):
        work = folder / str(i)
        shutil.copytree(folder / "whole", work)
        run, wanted = work / "out" / "run" / "checkpoints", dict(expected)
        (run / "epoch_3.pt").unlink()
        newest, rows = run / "epoch_2.pt", run / "results.jsonl"
        name = ("the newest checkpoint is cut", "the newest checkpoint is empty", "rows of validation are cut",
                "one that was being saved is left")[i % 4]
        if i % 4 < 2:
            newest.write_bytes(b"" if i % 4 else cut(newest.read_bytes(), rng))
        elif i % 4 == 2:
            rows.write_bytes(cut(rows.read_bytes(), rng))
            left = [line for line in rows.read_text().splitlines()[:2] if line.endswith("}")]  # the others are lost
            wanted[rows.name] = "".join(f"{line}\n" for line in (*left, expected[rows.name].splitlines()[2]))
        else:
            (run / "tmp.pt").write_bytes(cut(newest.read_bytes(), rng))
        ended = world.call(TRAIN, *argv, cwd=work)
        (run / "tmp.pt").unlink(missing_ok=True)
        yield f"{i} {name}", first(ended.problem(), None if ended.code else unlike(result(work), wanted),
                                   check_json(work))


# ---- JSON


def mutations(content: object, rng: Random, count: int) -> Iterator[tuple[str, bytes]]:
    """Texts that are no such JSON, and ones with a value of another kind in the place of one of it."""
    text = json.dumps(content)
    yield from [
        ("nothing", b""), ("a brace", b"{"), ("null", b"null"), ("a number", b"3"), ("a list", b"[]"),
        ("an object", b"{}"), ("NaN", b"NaN"), ("depth", b"[" * 100_000), ("no UTF-8", b"\xff\xfe" + text.encode()),
        ("Latin-1", text.replace("red", "r\u00e9d").encode("latin-1")), ("digits", b"1" * 10_000), ("zeros", bytes(99)),
        ("a mark at its beginning", b"\xef\xbb\xbf" + text.encode())]
    values = (None, True, -1, 0, 1e308, float("nan"), 10 ** 30, "", "x", "a/../../b", "\0", "\ud800", [], [None], {},
              {"a": {}}, [["a"]], "n" * 5000)
    places = list(paths(content))
    for i in range(count):
        place, value = rng.choice(places), rng.choice(values)
        yield (f"{i} {'.'.join(map(str, place))} = {ascii(value)[:20]}",
               json.dumps(changed(content, place, value)).encode())
        yield f"{i} cut", cut(text.encode(), rng)


def paths(content: object, place: tuple = ()) -> Iterator[tuple]:
    if place:
        yield place
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield from paths(value, (*place, key))


def changed(content: object, place: tuple, value: object) -> object:
    content = json.loads(json.dumps(content))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


def json_world(world: World) -> Path:
    """A folder with files of each kind, made once."""
    folder = world.folder / "json"
    if folder.exists():
        return folder
    with new_folder(folder) as work:
        (work / "images").mkdir()
        for i in range(3):
            (work / "images" / f"{i}.png").write_bytes(world.samples[i][0])
        write_shard(work / "0.tar", [("png", world.samples[i][0], "a red circle") for i in range(8)])
        made = [world.call(MDC, "export", "--pretrained", world.run, "--to", "open_clip", "--out", "exported",
                           cwd=work),
                world.tool("caption", "images", "--out", "a.jsonl", cwd=work),
                world.call(CLIP_BENCHMARK, *probe(world), cwd=work)]
        assert not first(*(ended.problem(0) for ended in made)), made
        (work / "sugarcrepe").mkdir()
        (work / "sugarcrepe" / "images").symlink_to(world.scenes / "sugarcrepe" / "images")
        shutil.copytree(world.run, work / "run")
    return folder


def probe(world: World) -> tuple:
    return ("eval", "--model", "mdc", "--pretrained", world.run, "--dataset", "wds/probe", "--dataset_root",
            world.scenes / "probe", "--task", "linear_probe", "--feature_root", "features", "--output", "result.json",
            "--num_workers", 0, "--no_amp", "--quiet", "--skip_existing")


def table(argv: list[str]) -> None:
    """python -m clip_benchmark_ext.table"""
    from clip_benchmark_ext import table
    sys.argv = ["table", *argv]
    table.main()


SMALL = ("--device", "cpu", "--workers", 0, "images", "--limit", 1, "--out", "c.jsonl", "--length", 2)


def readers(world: World, folder: Path) -> dict[str, tuple[object, Callable, tuple]]:
    """By file what it holds, and the command that reads it."""
    def content(file: str) -> object:
        return json.loads((folder / file).read_text().splitlines()[0] if file.endswith("l") else
                          (folder / file).read_text())
    rows = [{"filename": f"{i}.png", "filepath": "images", "split": "train", "sentences": [{"raw": "a red circle"}]}
            for i in range(3)]
    aro = [{"image_path": "0.png", "true_caption": "a", "false_caption": "b", "bbox_x": 0, "bbox_y": 0, "bbox_w": 9,
            "bbox_h": 9, "relation_name": "on"}]
    common = ("--model", "mdc", "--pretrained", world.run, "--num_workers", 0, "--no_amp", "--quiet", "--output",
              "e.json")
    return {
        "karpathy.json": ({"dataset": "coco", "images": rows}, MDC, (
            "prepare", "coco", "--images", ".", "--annotations", "karpathy.json", "--out", "p")),
        "sugarcrepe/swap_obj.json": (json.loads((world.scenes / "sugarcrepe" / "swap_obj.json").read_text()),
                                     CLIP_BENCHMARK, ("eval", *common, "--dataset", "sugar_crepe/swap_obj",
                                                      "--dataset_root", "sugarcrepe")),
        "visual_genome_relation.json": (aro, CLIP_BENCHMARK, ("eval", *common, "--dataset", "aro/vg_relation",
                                                              "--dataset_root", ".")),
        "a.jsonl": (content("a.jsonl"), MDC, ("caption", "--pretrained", world.run, *SMALL, "--html", "h.html",
                                              "--compare", "a.jsonl")),
        "b.json": ({"captions": {"0": "a", "1": "b"}}, JUDGE, (
            "--captions", "x=b.json", "y=b.json", "--images", "images", "--url", "http://127.0.0.1:9/v1",
            "--model", "m", "--out", "j.jsonl")),
        "sizes.json": ({"0.tar": 8}, TRAIN, tuple(train_flags(
            "--train-data", folder / "0.tar", "--dataset-type", "webdataset", "--batch-size", 4, "--epochs", 1,
            logs=Path("logs")))),
        "result.json": (content("result.json"), CLIP_BENCHMARK, probe(world)),
        "./result.json": (content("result.json"), table, ("result.json",)),
        "exported/open_clip_config.json": (content("exported/open_clip_config.json"), MDC, (
            "caption", "--pretrained", "local-dir:exported", *SMALL)),
    }


FILES = ("karpathy.json", "sugarcrepe/swap_obj.json", "visual_genome_relation.json", "a.jsonl", "b.json", "sizes.json",
         "result.json", "./result.json", "exported/open_clip_config.json")


def json_file(world: World, file: str) -> Cases:
    """Annotations, selections, captions to compare and to judge, sizes, results, an exported config."""
    source, folder = json_world(world), world.fresh(f"json-{file.replace('/', '-')}")
    shutil.copytree(source, folder, symlinks=True, dirs_exist_ok=True)
    content, main, argv = readers(world, folder)[file]
    for name, data in mutations(content, world.rng(file), world.args.broken // 2):
        (folder / file).write_bytes(data)
        for out in ("p", "logs", "c.jsonl", "h.html", "j.jsonl", "e.json"):
            shutil.rmtree(folder / out) if (folder / out).is_dir() else (folder / out).unlink(missing_ok=True)
        ended = world.call(main, *argv, cwd=folder)
        written = [out for out in ("c.jsonl", "e.json", "p") if (folder / out).exists()]
        if main is not CLIP_BENCHMARK or file != "result.json":  # there it is made again
            (folder / file).unlink()
        yield name, first(ended.problem(), check_json(folder), f"wrote {written}" if ended.code and written else None)


def params(world: World) -> Cases:
    """params.txt of a run."""
    folder = world.fresh("params")
    shutil.copytree(json_world(world), folder, symlinks=True, dirs_exist_ok=True)
    text = (world.run / "params.txt").read_bytes()
    for name, data in [("nothing", b""), ("zeros", bytes(100)), ("no name", b"name: x\n"),
                       ("depth", b"model: x\nimage_mean: " + b"(" * 10_000), ("no UTF-8", b"\xff" + text),
                       ("a list", text + b"force_image_size: ['a', {}]\n"),
                       ("a program", text + b"image_mean: __import__('os').system('touch started')\n")]:
        (folder / "run" / "params.txt").write_bytes(data)
        ended = world.call(MDC, "caption", "--pretrained", "run", *SMALL, cwd=folder)
        yield name, first(ended.problem(), "a program was started" if (folder / "started").exists() else None)


# ---- what a run leaves for the next


def tables(world: World) -> Cases:
    """Tables that broke, when the same command filters by them: right ones, or one line."""
    folder = world.fresh("parquet")
    argv = ("--pairs", f"{world.scenes}/train/{{00000..00001}}.tar", "--out", "s", "--top", 0.5, "--out-shards", "kept")
    yield "whole", world.tool("score", *argv, cwd=folder).problem(0)
    expected = tree(folder / "kept")
    whole = (folder / "s" / "00000.parquet").read_bytes()
    for name, data in damage(whole, world.rng("parquet"), world.args.broken):
        (folder / "s" / "00000.parquet").write_bytes(data)
        shutil.rmtree(folder / "kept")
        ended = world.tool("score", *argv, cwd=folder)
        wrong = unlike(tree(folder / "kept"), expected) if (folder / "kept").exists() else "nothing is kept"
        yield name, first(ended.problem(), wrong if ended.code == 0 else None)
        (folder / "kept").mkdir(exist_ok=True)


def journals(world: World) -> Cases:
    """A journal that broke off at any place, within a batch too: the same lines as without."""
    folder, rng = world.fresh("journals"), world.rng("journals")
    argv = ("caption", world.images, "--limit", 12, "--batch-size", 4, "--temperature", 1, "--out", "c.jsonl")
    kept = folder / "c.jsonl.part"

    def keep() -> None:
        Path.unlink = lambda self, **_: None
    yield "whole", world.tool(*argv, cwd=folder, prepare=keep).problem(0)
    expected, whole = (folder / "c.jsonl").read_bytes(), kept.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    places = [*ends, *(rng.randrange(len(whole)) for _ in range(world.args.broken))][:world.args.broken]
    for place in places:
        for more in (b"", b"\0" * 100):
            kept.write_bytes(whole[:place] + more)
            (folder / "c.jsonl").unlink()
            ended = world.tool(*argv, cwd=folder)
            same = (folder / "c.jsonl").exists() and (folder / "c.jsonl").read_bytes() == expected
            yield f"after {place} of {len(whole)} bytes, {len(more)} zeros", first(
                ended.problem(0), None if same else "other lines")


def features(world: World) -> Cases:
    """Features that are kept and broke are made anew."""
    folder = world.fresh("features")
    argv = ("eval", "--model", "mdc", "--pretrained", world.run, "--dataset", "wds/probe", "--dataset_root",
            world.scenes / "probe", "--task", "linear_probe", "--feature_root", "features", "--output", "r.json",
            "--num_workers", 0, "--no_amp", "--quiet")
    yield "whole", world.call(CLIP_BENCHMARK, *argv, cwd=folder).problem(0)
    expected = tree(folder)
    path = next((folder / "features").glob("test-*"))
    whole = path.read_bytes()
    for name, data in damage(whole, world.rng("features"), world.args.broken):
        path.write_bytes(data)
        ended = world.call(CLIP_BENCHMARK, *argv, cwd=folder)
        yield name, first(ended.problem(0), unlike({k: v for k, v in tree(folder).items() if k.endswith(".json")},
                                                   {k: v for k, v in expected.items() if k.endswith(".json")}))


PARTS = {"files: checkpoints": checkpoints, "files: training resumed": resumed,
         **{f"files: JSON, {file}": (lambda world, file=file: json_file(world, file)) for file in FILES},
         "files: params.txt": params, "files: parquet": tables, "files: journals": journals,
         "files: features": features}
