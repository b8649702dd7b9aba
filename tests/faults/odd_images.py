"""Odd and broken images, and how Pillow (numpy for 16-bit grey) decodes them."""
import io
import warnings
import zlib
from itertools import product
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps
from world import World

MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "I;16",
         "I;16B", "F")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "EPS", "TIFF", "PPM", "TGA", "JPEG2000", "AVIF", "ICO", "PDF", "SGI",
           "PCX", "DDS", "MPO")
READ = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM")
BOMB = 50_000_000  # pixels. A larger image may be read or refused
LONGEST = 100  # times its width


class Odd(NamedTuple):
    name: str
    suffix: str
    data: bytes


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def flat_png(width: int, height: int, *more: bytes) -> bytes:
    """One bit a pixel, all black: small in the file."""
    rows = zlib.compressobj()
    data = b"".join(rows.compress(bytes(1 + (width + 7) // 8)) for _ in range(height)) + rows.flush()
    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photograph(number: int) -> Image.Image:
    return Image.effect_noise((48, 40 + number % 5), 40 + number % 50).convert("RGB")


def special() -> list[Odd]:
    jpeg, small = saved(photograph(0), "JPEG"), photograph(1)
    turned = small.getexif()
    turned[0x0112] = 6
    wrong = small.getexif()
    wrong[0x0112] = 99
    bmp = bytearray(saved(small, "BMP"))
    bmp[18:26] = (100_000).to_bytes(4, "little") * 2
    gif = bytearray(saved(small, "GIF"))
    gif[6:10] = b"\xff" * 4
    return [
        Odd("nothing", "png", b""), Odd("text", "jpg", b"no image at all\n"), Odd("zeros", "png", bytes(5000)),
        Odd("html", "jpg", b"<html><body>404 Not Found</body></html>"),
        Odd("svg", "png", b'<svg xmlns="http://www.w3.org/2000/svg"/>'), Odd("bomb", "png", flat_png(60_000, 60_000)),
        Odd("large", "png", flat_png(9_000, 9_000)), Odd("text-bomb", "png", flat_png(
            8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(200_000_000))))),
        Odd("bmp-bomb", "png", bytes(bmp)), Odd("gif-bomb", "png", bytes(gif)), Odd("line", "png", flat_png(20_000, 1)),
        Odd("column", "png", flat_png(1, 20_000)), Odd("pixel", "png", flat_png(1, 1)),
        Odd("no-width", "png", flat_png(0, 4)), Odd("turned", "jpg", saved(small, "JPEG", exif=turned)),
        Odd("turned-wrongly", "jpg", saved(small, "JPEG", exif=wrong)),
        Odd("animation", "webp", saved(small, "WEBP", save_all=True, append_images=[photograph(6)])),
        Odd("animation", "png", saved(small, "PNG", save_all=True, append_images=[photograph(6)])),
        Odd("progressive", "jpg", saved(small, "JPEG", progressive=True)),
        Odd("profile", "jpg", saved(small, "JPEG", icc_profile=b"no profile" * 100)),
        Odd("exif", "jpg", saved(small, "JPEG", exif=b"Exif\0\0" + b"\xff" * 5000)),
        Odd("appended", "jpg", jpeg + b"<?php ?>" * 100), Odd("twice", "jpg", jpeg + jpeg),
        Odd("transparent", "png", saved(small.convert("P"), "PNG", transparency=3)),
        Odd("sixteen", "png", saved(Image.fromarray(np.arange(0, 64_000, 40, np.uint16).reshape(40, 40)), "PNG")),
    ]


def of_modes() -> list[Odd]:
    """Every mode in every format that takes it, under the names of formats that are read."""
    found = []
    for number, (mode, kind) in enumerate(product(MODES, FORMATS)):
        try:
            image = photograph(number)
            image = image.convert("L").convert(mode) if mode in ("I;16", "I;16B", "LA", "La", "PA", "1") else (
                image.convert("RGBA").convert(mode) if mode == "RGBa" else image.convert(mode))
            data = saved(image, kind)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        suffix = {"PNG": "png", "WEBP": "webp"}.get(kind, "jpg")
        found.append(Odd(f"{mode.replace(';', '')}-{kind}", suffix, data))
    return found


def damaged(rng: Random, number: int) -> Odd:
    """A picture cut off at a random place, or with some bytes changed."""
    kind = rng.choice(READ[:3])
    data = bytearray(saved(photograph(number), kind))
    if number % 2:
        return Odd(f"cut-{kind}", {"JPEG": "jpg"}.get(kind, kind.lower()), bytes(data[:rng.randrange(len(data))]))
    for _ in range(rng.choice((1, 1, 4, 40))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return Odd(f"rot-{kind}", {"JPEG": "jpg"}.get(kind, kind.lower()), bytes(data))


def odd_images(world: World) -> list[Odd]:
    """World's number of images with different names: all kinds, then damaged ones."""
    rng, count = world.rng("images"), world.args.images
    found = special() + of_modes()
    if count < 2 * len(found):  # half of them are damaged
        found = rng.sample(found, count // 2)
    found += [damaged(rng, number) for number in range(count - len(found))]
    return [odd._replace(name=f"{number:03d}-{odd.name}") for number, odd in enumerate(found)]


def decoded(data: bytes) -> Image.Image | None:
    """Return an image as files of others are to be read, or None if it cannot be read."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=READ) as image:
            warnings.simplefilter("ignore")
            if image.width * image.height > BOMB:
                return image
            if image.mode in ("I", "F") and image.format != "PNG":  # of which nothing says what is white
                return None
            if image.mode[0] == "I":  # 16 bits, of which Pillow's conversion makes white
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:
        return None


def is_stored(data: bytes) -> bool:
    """Return whether a shard holds it as it is: JPEG, PNG and WebP, by the first bytes."""
    return data[:3] == b"\xff\xd8\xff" or data[:8] == b"\x89PNG\r\n\x1a\n" or data[8:12] == b"WEBP"


def same_pixels(data: bytes, other: bytes) -> bool:
    a, b = decoded(data), decoded(other)
    return a is not None and b is not None and np.array_equal(np.asarray(a), np.asarray(b))
