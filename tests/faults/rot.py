"""Damaged safetensors in every place that reads them, and members of shards that would fill the memory.

A file of weights must give exactly the weights that were saved, or be refused in one line that names it. A changed bit
is noticed only if the header has a checksum. Huge members are refused by their headers, before they are read.
"""
import gzip
import json
import logging
import resource
import shutil
import struct
import tarfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from files import cut, probe, rot
from safetensors.torch import save_file
from tars import make as make_tar
from torch import Tensor
from world import CLIP_BENCHMARK, LENGTHS, MDC, Cases, World, check_json, each, first

import open_clip_mdc
from open_clip_mdc.cli import taming
from open_clip_mdc.data import shards, weights
from open_clip_mdc.integration import checkpoints, saving

MODEL = "MDC-ViT-Ti-8"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%064x\nsize %d\n"


# ---- weights


def with_header(whole: bytes, header: bytes) -> bytes:
    """The file with another header."""
    size, = struct.unpack("<Q", whole[:8])
    return struct.pack("<Q", len(header)) + header + whole[8 + size:]


def changed_header(whole: bytes, rng: Random) -> bytes:
    """A tensor whose place, shape or type is another: none that fits the file."""
    size, = struct.unpack("<Q", whole[:8])
    content = json.loads(whole[8:8 + size])
    name = rng.choice([name for name in content if name != "__metadata__"])
    begin, end = content[name]["data_offsets"]
    content[name] |= rng.choice([
        {"data_offsets": [begin + 4, end]}, {"data_offsets": [begin, end + rng.choice((1, 4, 10 ** 12))]},
        {"data_offsets": [end, begin - 1]}, {"data_offsets": [-1, end]}, {"data_offsets": []}, {"dtype": "F99"},
        {"dtype": "F64"}, {"shape": [*content[name]["shape"], 3]}, {"shape": [2 ** 62, 2 ** 62]}, {"shape": [-1]},
        {"shape": None}])
    if rng.random() < 0.2:
        del content[name]  # its bytes are nobody's
    return with_header(whole, json.dumps(content).encode())


def not_finite(state: dict[str, Tensor], path: Path, rng: Random) -> bytes:
    """Make one number NaN or infinite, with right checksums."""
    name = rng.choice([name for name, x in state.items() if x.is_floating_point() and x.numel()])
    changed = state[name].clone()
    changed.view(-1)[rng.randrange(changed.numel())] = rng.choice((float("nan"), float("inf"), -float("inf")))
    weights.save(state | {name: changed}, path)
    return path.read_bytes()


KINDS = ("bit", "bits", "cut", "cut early", "longer", "pointer", "size", "header", "no finite number", "zeros", "blank",
         "page", "gzip", "joined")


def rotten(kind: str, whole: bytes, state: dict[str, Tensor], path: Path, rng: Random) -> bytes:
    """Return a whole file as damaged by one of KINDS."""
    if kind == "bits":  # a block of the disk
        place = rng.randrange(len(whole))
        return whole[:place] + rng.randbytes(min(4096, len(whole) - place)) + whole[place + 4096:]
    if kind == "zeros":  # a copy that was cut off, of the right size
        place = rng.randrange(len(whole) - 8)
        return whole[:place] + bytes(len(whole) - place)
    if kind == "size":
        size, = struct.unpack("<Q", whole[:8])
        return struct.pack("<Q", rng.choice((size + 1, size - 1, 0, 1, 2 ** 63, 2 ** 40, len(whole),
                                             rng.randrange(2 ** 64)))) + whole[8:]
    return {"bit": lambda: rot(whole, rng), "cut": lambda: cut(whole, rng),
            "cut early": lambda: cut(whole[:20_000], rng),
            "longer": lambda: whole + rng.randbytes(rng.randrange(1, 5000)),
            "pointer": lambda: POINTER % (rng.getrandbits(256), len(whole)),
            "header": lambda: changed_header(whole, rng),
            "no finite number": lambda: not_finite(state, path, rng), "blank": lambda: bytes(rng.randrange(5000)),
            "page": lambda: b"<!DOCTYPE html><title>404</title>" * 9, "gzip": lambda: gzip.compress(whole[:9999]),
            "joined": lambda: whole + whole}[kind]()


def alike(found: dict, right: dict[str, Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], x) for name, x in right.items())


def ways_in(folder: Path) -> dict[str, tuple[Path, Callable[[], dict]]]:
    """Return by name the file and the function that reads its weights, for export folders and single files."""
    import open_clip
    exported, alone, bare = folder / "e" / "open_clip_model.safetensors", folder / "w.safetensors", folder / "w.pt"
    return {
        "export folder": (exported, lambda: checkpoints.load(str(folder / "e"))[0].state_dict()),
        "local-dir:": (exported, lambda: open_clip_mdc.load(f"local-dir:{folder}/e", device="cpu").model.state_dict()),
        "OpenCLIP's local-dir:": (exported, lambda: open_clip.create_model(f"local-dir:{folder}/e").state_dict()),
        "load": (alone, lambda: checkpoints.load(str(alone), MODEL)[0].state_dict()),
        "--pretrained": (bare, lambda: open_clip.create_model(MODEL, str(bare)).state_dict()),
        "--resume": (bare, lambda: saving.pt_load(None)(str(bare), "cpu")),
        "vq import": (alone, lambda: taming.read_tensors(str(alone))),
        "tensors": (alone, lambda: weights.tensors(alone)),
    }


def safetensors(world: World) -> Cases:
    """World's number of rotten files, each by a way that is drawn."""
    folder, rng = world.fresh("rot-weights"), world.rng("rot-weights")
    made = world.call(MDC, "export", "--pretrained", world.run, "--to", "open_clip", "--out", "e", cwd=folder)
    if problem := made.problem(0):
        yield "export", problem
        return
    open_clip_mdc.register()
    ways = ways_in(folder)
    whole = ways["local-dir:"][0].read_bytes()
    state = {name: x.clone() for name, x in weights.tensors(ways["local-dir:"][0]).items()}  # else parts of the file
    save_file(state, folder / "w.safetensors")
    plain = (folder / "w.safetensors").read_bytes()

    def check(case: tuple[str, str, int]) -> str | None:
        way, kind, seed = case
        (path, read), own = ways[way], Random(seed)
        noticed = kind not in ("bit", "bits", "zeros")  # without a checksum
        data = whole if not noticed or own.random() < 0.5 else plain
        path.write_bytes(data if kind == "whole" else rotten(kind, data, state, folder / "made", own))
        try:
            found = read()
        except (ValueError, OSError) as problem:
            said = str(problem)
            named = any(name in said for name in (path.name, str(path.parent)))
            return f"refused: {said}" if kind == "whole" else f"says {said[:200]!r}" if (
                "\n" in said or not named or len(said) > 700 or "weights_only" in said) else None
        found = found.get("state_dict", found)
        right = alike(found, state)
        harmless = kind in ("whole", "bit", "bits", "zeros", "header")  # where nothing means anything
        return None if right and harmless else "read as other weights" if not right else "read as if it were whole"

    items = [(f"{way}: whole", (way, "whole", i)) for way in ways for i in range(2)]
    items += [(f"{i} {way}: {kind}", (way, kind, rng.getrandbits(64))) for i, (way, kind) in enumerate(
        zip(rng.choices(list(ways), k=world.args.rot), rng.choices(KINDS, k=world.args.rot), strict=True))]
    yield from each(world, items, check, folder)


def weights_by_commands(world: World) -> Cases:
    """caption of an export folder, clip_benchmark of it, and --pretrained of training: the same lines, or one."""
    folder, rng = world.fresh("rot-commands"), world.rng("rot-commands")
    yield "export", world.call(MDC, "export", "--pretrained", world.run, "--to", "open_clip", "--out", "e",
                               cwd=folder).problem(0)
    path = folder / "e" / "open_clip_model.safetensors"
    whole, state = path.read_bytes(), {name: x.clone() for name, x in weights.tensors(path).items()}
    argv = ("caption", "--pretrained", "local-dir:e", "--device", "cpu", "--workers", 0, world.images, "--limit", 4,
            "--out", "out.jsonl")
    yield "whole", world.call(MDC, *argv, cwd=folder).problem(0)
    expected = (folder / "out.jsonl").read_bytes()
    eval_argv = [f"local-dir:{folder}/e" if part == world.run else part for part in probe(world)]
    for i in range(world.args.broken):
        kind = KINDS[i % len(KINDS)]
        path.write_bytes(rotten(kind, whole, state, folder / "made", rng))
        (folder / "out.jsonl").unlink(missing_ok=True)
        ended = world.call(MDC, *argv, cwd=folder)
        right = ended.code == 0 and (folder / "out.jsonl").read_bytes() == expected  # a byte that means nothing
        yield f"{i} caption: {kind}", None if right and kind in ("bit", "bits", "header") else ended.problem(1)
        shutil.rmtree(folder / "features", ignore_errors=True)
        (folder / "result.json").unlink(missing_ok=True)
        ended = world.call(CLIP_BENCHMARK, *eval_argv, cwd=folder)
        yield f"{i} clip_benchmark: {kind}", ended.problem(0 if right else 1)
        ended = world.train("--train-data", world.csv, "--batch-size", 24, "--epochs", 1, "--pretrained", path,
                            cwd=folder, name=f"run{i}")
        yield f"{i} training: {kind}", ended.problem(0 if right else 1)


# ---- members of shards


MOST, MOST_TEXT = 2 ** 16, 2 ** 13  # bytes that are read of a member here
MEMORY = 200_000  # kB that a refusal may cost
GIANTS = ("1.png", "1.jpg", "1.webp", "1.npy", "1.txt", "1.json", "1.JSON", "long name", "long link", "PAX name",
          "PAX header", "global PAX header", "sparse", "sparse text")


def sparse(name: str, size: int) -> bytes:
    """The header of a member of GNU's that holds nothing but a hole."""
    info = tarfile.TarInfo(name)
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[386:483] = bytes(97)
    block[483:495] = b"%011o\0" % size if size < 8 ** 11 else b"\x80" + size.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def extension(kind: bytes, content: bytes) -> bytes:
    info = tarfile.TarInfo("././@Extension")
    info.type, info.size = kind, len(content)
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def giant(kind: str, size: int) -> bytes:
    """Blocks of a tar: a member of so many bytes, or what stands before one."""
    if kind.startswith("sparse"):
        return sparse("1.png" if kind == "sparse" else "1.txt", size)
    name = "long" if " " in kind or "PAX" in kind else kind
    record = b"%d comment=" % size + b"x" * (size - len(b"%d comment=" % size) - 1) + b"\n"
    before = {"long name": (tarfile.GNUTYPE_LONGNAME, b"n" * (size - 1) + b"\0"),
              "long link": (tarfile.GNUTYPE_LONGLINK, b"n" * (size - 1) + b"\0"),
              "PAX name": (tarfile.XHDTYPE, record.replace(b" comment=", b" path=nnn")),
              "PAX header": (tarfile.XHDTYPE, record), "global PAX header": (tarfile.XGLTYPE, record)}
    if kind in before:
        return extension(*before[kind]) + make_tar([(tarfile.TarInfo("x.dat"), b"")])[:512]
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(size + -size % 512)


def limit(kind: str) -> int:
    return MOST if kind in ("1.png", "1.jpg", "1.webp", "1.npy", "sparse") else MOST_TEXT


def swollen(samples: list[tuple], kind: str, size: int, place: int, packed: bool, path: Path) -> None:
    """Pairs, among which the giant stands."""
    blocks = []
    for i, (image, text) in enumerate(samples):
        for name, data in ((f"k{i}.png", image), (f"k{i}.txt", text.encode())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            blocks.append(info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
    blocks.insert(2 * place, giant(kind, size))
    content = b"".join(blocks) + bytes(1024)
    path.write_bytes(gzip.compress(content, 1) if packed else content)


def training_texts(path: Path) -> list[str]:
    """Return the texts that a validation pass over a shard reads."""
    from open_clip_train import data
    args = Namespace(train_data=str(path), val_data=str(path), train_num_samples=1, val_num_samples=None, seed=0,
                     rank=0, train_data_upsampling_factors=None, workers=0, batch_size=1, world_size=1, device="cpu")
    info = data.get_wds_dataset(args, lambda image: torch.zeros(1), False, tokenizer=lambda text: [text])
    return [text for _, (text,) in info.dataloader]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def members(world: World) -> Cases:
    """Write World's number of shards with one giant member, for all readers. A member just at the limit is read."""
    folder, rng = world.fresh("rot-members"), world.rng("rot-members")
    samples = world.samples[:6]
    open_clip_mdc.register(training=True)
    logging.disable(logging.NOTSET)

    def check(case: tuple) -> str | None:
        shards.LARGEST, shards.LARGEST_TEXT = MOST, MOST_TEXT
        kind, size, place, packed = case
        path, above, before = folder / "0.tar", size > limit(kind), peak()
        swollen(samples, kind, size, place, packed, path)
        found, said = [], None
        try:
            for sample in shards.read_samples(str(path)):
                found += [sample["txt"].decode()] if {"png", "txt"} <= sample.keys() else []
        except ValueError as problem:
            said = str(problem)
        texts = [text for _, text in samples]
        wrong = first(
            None if bool(said) == above else f"refused at its limit: {said}" if said else "was read",
            None if not said or "0.tar: its member" in said and "\n" not in said and len(said) < 700 else
            f"says {said[:200]!r}",
            None if found == texts[:len(found)] and len(found) >= (place - 1 if above else len(texts)) else
            f"{len(found)} samples")
        trained = training_texts(path)
        wrong = wrong or (None if trained == texts[:len(trained)] or set(trained) <= set(texts) else "other texts")
        wrong = wrong or (None if len(trained) >= max(place - 1, 0) else f"training reads {len(trained)}")
        return wrong or (f"takes {peak() - before} kB" if peak() - before > MEMORY else None)

    def draw(number: int) -> tuple[str, tuple]:
        kind = GIANTS[number % len(GIANTS)]
        size = rng.choice((limit(kind), limit(kind) + 1, 3 * limit(kind), 40 * limit(kind)))
        if kind.startswith("sparse"):
            size = limit(kind) + rng.choice((1, 2 ** 30, 2 ** 33, 2 ** 60))  # costs a block of the file
        place, packed = rng.randrange(len(samples) + 1), rng.random() < 0.5
        return f"{number} {kind}, {size} bytes after {place} pairs{', gzip' * packed}", (kind, size, place, packed)

    yield from each(world, map(draw, range(world.args.rot)), check, folder)


def members_by_commands(world: World) -> Cases:
    """Holes beyond the limits that users have, by every command: one line that names the shard."""
    model = ("--pretrained", world.run, "--device", "cpu", "--workers", 0)
    flags = ("--dataset-type", "webdataset", "--train-num-samples", 4, "--batch-size", 2, "--epochs", 1)
    for kind in ("sparse", "sparse text"):
        folder = world.fresh("rot-holes")
        swollen(world.samples[:8], kind, 2 ** 29, 6, False, folder / "0.tar")
        for name, argv in {
                "caption": ("caption", *model, "0.tar", "--length", 2, "--out", "c.jsonl"),
                "caption, tables": ("caption", *model, "0.tar", "--length", 2, "--out", "c"),
                "embed": ("embed", *model, "0.tar", "--out", "e"),
                "score": ("score", *model, "--pairs", "0.tar", "--blind-images", world.images, "--out", "s"),
                "prepare": ("prepare", "shards", "--train", "0.tar", "--out", "p"),
                "lengths": ("lengths", "0.tar", "--out", "l.png")}.items():
            ended = world.call(LENGTHS, *argv[1:], cwd=folder) if name == "lengths" else world.call(
                MDC, *argv, cwd=folder)
            reads = kind == "sparse text" or name != "lengths"  # which reads no image
            yield f"{name}: {kind}", first(ended.problem(1 if reads else 0), check_json(folder),
                                           None if "0.tar: its member" in ended.err or not reads else
                                           f"says {ended.last_line()[:200]}",
                                           None if not (folder / "p").exists() else "wrote shards")
        ended = world.train("--train-data", folder / "0.tar", *flags, cwd=folder)
        yield f"training: {kind}", first(ended.problem(0), None if "its member" in ended.err else "says nothing of it")


PARTS = {"rot: safetensors": safetensors, "rot: safetensors by commands": weights_by_commands,
         "rot: members": members, "rot: members by commands": members_by_commands}
