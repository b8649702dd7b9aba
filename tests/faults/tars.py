"""Send broken tars through caption, score, prepare, lengths, training and the benchmark.

The samples of each tar are known. A command gives the rows of all of them, or it says in one line that the tar is
damaged and writes nothing from it.
"""
import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
from world import CLIP_BENCHMARK, LENGTHS, MDC, RECAP, Cases, World, check_json, first, strict_json

from open_clip_mdc.data.shards import read_samples

PAIRS = 8  # of a tar
ENDS = 1024  # bytes of zeros at the end of an archive


class Tar(NamedTuple):
    name: str
    data: bytes
    samples: int  # with image and caption
    images: int  # with image
    damaged: bool = False  # True: it may be refused. False: it must be read


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> tuple:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(data), kind, link
    return info, data


def make(members: list[tuple], **options) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return buffer.getvalue().rstrip(b"\0") + bytes(ENDS + 512 - len(buffer.getvalue().rstrip(b"\0")) % 512)


def pair(name: str, image: bytes, caption: str = "a red circle") -> list[tuple]:
    return [member(f"{name}.png", image), member(f"{name}.txt", caption.encode()),
            member(f"{name}.json", json.dumps({"caption": caption, "filename": name}).encode())]


def broken_tars(world: World) -> list[Tar]:
    """World's number of them."""
    rng, image = world.rng("tars"), [image for image, _ in world.samples[:PAIRS]]
    pairs = [pair(f"{i:03d}", image[i]) for i in range(PAIRS)]
    members = sum(pairs, [])
    whole = make(members)
    places = [0, *(end for end in range(512, len(whole) - ENDS, 512)
                   if tarfile.BLOCKSIZE and whole[end + 257:end + 262] == b"ustar")]
    outside = [m for i, name in enumerate(("../escape", "/tmp/faults-escape", "a/../../escape"))
               for m in pair(name, image[i])]
    links = [member("l.png", kind=tarfile.SYMTYPE, link="/etc/passwd"), member("l.txt", b"a link"),
             member("h.png", kind=tarfile.LNKTYPE, link="000.png"), member("h.txt", b"a link"),
             member("f.png", kind=tarfile.FIFOTYPE), member("d.png", kind=tarfile.CHRTYPE),
             member("dir.png", kind=tarfile.DIRTYPE)]
    header = bytearray(whole)
    header[places[PAIRS] + 150] ^= 1
    size = bytearray(whole[:places[-1]])
    big = tarfile.TarInfo("big.png")
    big.size = 2 ** 33
    found = [
        Tar("names that lead out", make(outside + members), PAIRS + 3, PAIRS + 3),
        Tar("links and devices", make(links + members), PAIRS, PAIRS),
        Tar("duplicate keys", make(members + members), 2 * PAIRS, 2 * PAIRS),
        Tar("no captions", make([m for p in pairs for m in p[:1]]), 0, PAIRS),
        Tar("no images", make([m for p in pairs for m in p[1:]]), 0, 0),
        Tar("cut between samples", whole[:places[3 * (PAIRS // 2)]], PAIRS, PAIRS, True),
        Tar("cut between image and caption", whole[:places[3 * (PAIRS // 2) + 1]], PAIRS, PAIRS, True),
        Tar("without its end", whole[:-ENDS], PAIRS, PAIRS, True), Tar("empty", b"", 0, 0, True),
        Tar("an archive of nothing", bytes(10240), 0, 0), Tar("text", b"this is no tar\n" * 100, 0, 0, True),
        Tar("a header of another checksum", bytes(header), PAIRS, PAIRS, True),
        Tar("a member of 8 GiB that is not there", bytes(size) + big.tobuf() + bytes(100_000), PAIRS, PAIRS, True),
        Tar("compressed", gzip.compress(whole), PAIRS, PAIRS, True),
        Tar("compressed and cut", gzip.compress(whole)[:-len(whole) // 40], PAIRS, PAIRS, True),
        Tar("odd names", make([m for name in ("ä 犬", "n" * 300, "a\nb", "-rf", "x.y.z", "", "<b>") for m in pair(
            name, image[0])] + members), PAIRS + 6, PAIRS + 6, True),  # "" has no key
        Tar("upper case", make([member("A.PNG", image[0]), member("A.TXT", b"a star"), member("A.JSON", json.dumps(
            {"caption": "a star"}).encode())]), 1, 1),
    ]
    while len(found) < world.args.tars:
        place = rng.randrange(1, len(whole) - ENDS)
        found.append(Tar(f"cut after {place} of {len(whole)} bytes", whole[:place], PAIRS, PAIRS, True))
    return found[:world.args.tars]


def lines(path: Path) -> int:
    return len([strict_json(line) for line in path.read_text().splitlines()])


def count_tables(folder: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


def count_samples(folder: Path) -> int:
    return sum(len(list(read_samples(str(path)))) for path in folder.rglob("*.tar"))


def through(world: World) -> Cases:
    """Every command on every tar."""
    common = ("--model", "mdc", "--pretrained", world.run, "--num_workers", 0, "--no_amp", "--quiet")
    for tar in broken_tars(world):
        folder = world.fresh("tars/case")
        wds = folder / "wds" / "test"
        wds.mkdir(parents=True)
        (wds / "nshards.txt").write_text("1")
        path = wds / "0.tar"
        path.write_bytes(tar.data)
        before = path.read_bytes()

        def ends(command: str, ended, rows, wanted: int, tar=tar, folder=folder, whole=False) -> tuple:
            """Return a case that passes with all rows, or with one line and none.

            If no row can be read, nothing at all is right, too.

            Args:
                whole: the command takes only pairs, and may refuse a tar that holds anything else.
            """
            problem = first(ended.problem(), check_json(folder))
            left_out = "all else is written" in ended.err  # samples without an image or a caption
            if not problem and ended.code and wanted and not (tar.damaged or whole or left_out):
                problem = f"refused: {ended.last_line()[:200]}"
            if not problem and rows is not None:
                found = rows()
                if found != wanted and (found or not ended.code):
                    problem = f"{found} rows of {wanted}, exit status {ended.code}: {ended.last_line()[:150]}"
            escaped = [p for p in (folder.parent / "escape.png", folder / "escape.png", Path("/tmp/faults-escape.png"))
                       if p.exists()]
            return f"{command}: {tar.name}", problem or (f"wrote {escaped}" if escaped else None)

        captions, tables, scores = folder / "c.jsonl", folder / "t", folder / "s"
        ended = world.tool("caption", path, "--length", 2, "--out", captions, cwd=folder)
        named_and_left = ended.code and "skipped, all else is written" in ended.err and tar.damaged
        yield ends("caption", ended, None if named_and_left else lambda p=captions: lines(p) if p.exists() else 0,
                   tar.images)
        ended = world.tool("caption", path, "--length", 2, "--out", tables, cwd=folder)
        yield ends("caption, tables", ended, lambda p=tables: count_tables(p), tar.images)
        ended = world.tool("score", "--pairs", path, "--blind-images", world.images, "--out", scores, cwd=folder)
        yield ends("score --pairs", ended, lambda p=scores: count_tables(p), tar.samples)
        ended = world.call(MDC, "prepare", "shards", "--train", path, "--captions-key", "caption", "--skip-broken",
                           "--out", folder / "p", cwd=folder)
        has_json = 0 if tar.name in ("no captions", "no images") else tar.samples
        yield ends("prepare shards", ended, lambda p=folder / "p": count_samples(p), has_json)
        ended = world.call(RECAP, "--shards", path, "--pairs", max(tar.samples, 1), "--out",
                           folder / "r", cwd=folder)
        yield ends("prepare recap", ended, lambda p=folder / "r": count_samples(p), tar.samples)
        ended = world.call(LENGTHS, path, "--out", folder / "l.png", cwd=folder)
        yield ends("lengths", ended, None, 0)
        ended = world.train("--train-data", path, "--dataset-type", "webdataset", "--train-num-samples", 8,
                            "--batch-size", 4, "--epochs", 1, cwd=folder)
        yield ends("training", ended, None, 0)
        ended = world.call(CLIP_BENCHMARK, "eval", *common, "--dataset", "wds/x", "--dataset_root", folder / "wds",
                           "--task", "captioning", "--caption_length", 2, "--output", folder / "e.json", cwd=folder)

        def evaluated(p=folder / "e.json") -> int:
            return json.loads(p.read_text())["metrics"]["images"] if p.exists() else 0
        yield ends("captioning", ended, evaluated, tar.samples, whole=True)
        yield f"the tar itself: {tar.name}", None if path.read_bytes() == before else "it was changed"


PARTS = {"tars": through}
