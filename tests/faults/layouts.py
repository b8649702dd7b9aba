"""Images with captions in common layouts, with odd captions and damaged files.

From an undamaged layout `prepare shards` must take each image with its own captions. From a damaged one it may take
fewer, if it names those that are left out, or end in one line that names the file.
"""
import sys
from pathlib import Path
from random import Random

from people import caption
from world import REPO, Cases, World, each

from open_clip_mdc.cli.prepare import usable
from open_clip_mdc.cli.prepare_layouts import read

sys.path[:0] = [str(REPO / "tests" / "tools")]

import layout_files  # noqa: E402
from shard_files import make_image  # noqa: E402

IMAGES = [make_image(i) for i in range(layout_files.N)]
OTHERS = (".parquet", ".json", ".jsonl", ".csv", ".tsv", ".txt", ".tar")


def odd_captions(rng: Random) -> list[list[str]]:
    return [[" ".join(caption(rng).split()) or "a dog" for _ in range(rng.randrange(1, 6))] for _ in IMAGES]


def damage(data: bytes, rng: Random) -> bytes:
    """Change some bytes, half of them among the last, where parquet and zip say what a file holds."""
    data = bytearray(data or b"x")
    for _ in range(rng.choice((1, 1, 3, 10, 50))):
        place = len(data) - 1 - rng.randrange(min(len(data), rng.choice((600, 10 ** 9))))
        size = rng.choice((1, 2, 8, 100))
        data[place:place + size] = rng.choice((b"", bytes(size), rng.randbytes(size), data[place:place + size] * 2))
        data = data or bytearray(b"x")
    return bytes(data)


def check(case: tuple[Path, object, Random, bool]) -> str | None:
    folder, layout, rng, damaged = case
    source, _, captions = layout(folder, odd_captions(rng))
    if damaged:
        file = rng.choice(sorted(path for path in folder.rglob("*") if path.suffix in OTHERS))
        file.write_bytes(damage(file.read_bytes(), rng))
    left_out: list = []
    try:
        found = [(sample.image, sample.captions) for _, sample in usable(
            read(str(source[0]), [str(source[2])] if source[1:] else [], "captions"), left_out)]
    except (ValueError, OSError) as problem:
        clear = damaged and "\n" not in str(problem) and str(folder) in str(problem)
        return None if clear else f"{type(problem).__name__}: {problem}"
    if not damaged:
        wrong = [i for i, (mine, own) in enumerate(zip(found, zip(IMAGES, captions, strict=True), strict=True))
                 if mine != own]
        return f"image {wrong[0]} has {found[wrong[0]][1]}, not {captions[wrong[0]]}" if wrong else None
    bytes_in_file = file.suffix in (".parquet", ".tar")  # whose pixels may change with it
    return "an image of nobody" if not bytes_in_file and any(image not in IMAGES for image, _ in found) else None


def layouts(world: World) -> Cases:
    """World's number of layouts, whole and damaged."""
    folder = world.fresh("layouts")
    items = []
    for number in range(world.args.people):
        layout, damaged = layout_files.LAYOUTS[number % len(layout_files.LAYOUTS)], number // 2 % 2 == 1
        items.append((f"{number} {layout.__name__}{', damaged' * damaged}", (
            folder / str(number), layout, world.rng(f"layouts {number}"), damaged)))
    yield from each(world, items, check, folder)


PARTS = {"layouts": layouts}
