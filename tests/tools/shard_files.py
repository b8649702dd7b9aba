"""Write and read shards, make images with five captions each, and run `open_clip_mdc prepare`."""
import io
import tarfile
from functools import cache
from pathlib import Path

from conftest import run_tool
from PIL import Image

COLOURS, SHAPES = ("red", "green", "blue", "yellow"), ("circle", "square")
ENDINGS = ("left of", "right of", "up above", "down below", "in the middle")


def texts(i: int) -> list[str]:
    """The five captions of image i of eight, in the scenes' words."""
    return [f"a {COLOURS[i % 4]} {SHAPES[i // 4 % 2]} {ending}" for ending in ENDINGS]


@cache
def make_image(i: int, kind: str = "jpeg") -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((40 + i, 40), 60).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}


def samples(*shards: Path) -> dict[str, dict[str, bytes]]:
    """The members of tar files, grouped by key."""
    grouped: dict = {}
    for name, data in (item for shard in shards for item in members(shard).items()):
        key, extension = name.split(".")
        grouped.setdefault(key, {})[extension] = data
    return grouped


def write_tar(path: Path, content: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def tool(*argv) -> None:
    run_tool(["prepare", *map(str, argv)])
