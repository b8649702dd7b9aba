"""Files as users have them, whole and damaged, for hypothesis.

What is in a file is known before it is written. A reader must give just this, or refuse the file in one line.
"""
import csv
import gzip
import io
import json
import struct
import tarfile
import warnings
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from conftest import LENGTH, png, saved
from hypothesis import settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from safetensors.torch import save

MODES = "1 L LA P PA RGB RGBA RGBX CMYK YCbCr LAB HSV I I;16 F".split()
READ = "JPEG PNG WEBP BMP GIF TIFF AVIF JPEG2000 PPM".split()
FOREIGN = [*READ, *"TGA ICO SGI PCX EPS PDF DDS".split()]
ORIENTATION = 0x0112

randoms = st.integers(0, 2 ** 32 - 1).map(Random)  # sources of chance that a failing example names


lengths = st.lists(st.integers(2, LENGTH), min_size=1, max_size=8)  # of captions, SOT and EOT included


def examples(number: int) -> settings:
    """The same examples in every run, with no limit of time on a busy machine."""
    return settings(max_examples=number, derandomize=True, deadline=None, database=None)


def damage(data: bytes, rng: Random) -> bytes:
    """Cut the bytes off, or change some of them: half of these among the last, where zip and parquet have an index."""
    data = bytearray(data or b"x")
    if rng.random() < 0.3:
        return bytes(data[:rng.randrange(len(data))])
    for _ in range(rng.choice((1, 1, 3, 10, 50))):
        place = len(data) - 1 - rng.randrange(min(len(data), rng.choice((600, 10 ** 9))))
        size = rng.choice((1, 2, 8, 100))
        data[place:place + size] = rng.choice((b"", bytes(size), rng.randbytes(size), data[place:place + size] * 2))
        data = data or bytearray(b"x")
    return bytes(data)


# ---- tars


class Tar(NamedTuple):
    """A tar file, the keys of its pairs in order, and whether a reader may refuse it."""

    data: bytes
    keys: list[str]
    damaged: bool
    giant: bool = False  # it must be refused

    def __repr__(self) -> str:
        return f"Tar of {len(self.data)} bytes, damaged={self.damaged}, giant={self.giant}"


def member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, size: int | None = None) -> bytes:
    """The blocks of a member. A size that is given may be more than its bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size or len(data), kind, "000.png" * (kind in b"12")
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


def tar(members: dict[str, bytes] | list[tuple[str, bytes]]) -> bytes:
    """A whole tar file. A list may hold a name twice."""
    pairs = members.items() if isinstance(members, dict) else members
    return b"".join(member(name, data) for name, data in pairs) + bytes(1024)


def pair(key: str, number: int = 0) -> bytes:
    return member(f"{key}.png", png(number, 8)) + member(f"{key}.txt", key.encode(errors="surrogateescape"))


def sparse(name: str, size: int) -> bytes:
    """The header of a member of GNU's that holds nothing but a hole."""
    block = bytearray(member(name, kind=tarfile.GNUTYPE_SPARSE))
    block[386:495] = bytes(97) + b"\x80" + size.to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def giant(kind: str, size: int) -> bytes:
    """A member of so many bytes, or the header of one whose name is as long."""
    headers = {"long name": tarfile.GNUTYPE_LONGNAME, "long link": tarfile.GNUTYPE_LONGLINK, "PAX": tarfile.XHDTYPE,
               "global PAX": tarfile.XGLTYPE}
    if kind in headers:
        record = b"%d comment=" % size
        content = record + b"x" * (size - len(record) - 1) + b"\n" if "PAX" in kind else b"n" * (size - 1) + b"\0"
        return member("long", content, headers[kind]) + member("x.dat")
    return sparse(f"big.{kind[7:]}", size) if kind.startswith("sparse") else member(f"big.{kind}", bytes(size))


GIANTS = ("png", "jpg", "npy", "txt", "json", "JSON", "long name", "long link", "PAX", "global PAX", "sparse png",
          "sparse txt")


@st.composite
def tars(draw, largest: int, largest_text: int) -> Tar:
    """A valid tar of pairs after one of many mutations.

    Args:
        largest: bytes of a member that are read.
        largest_text: bytes of a text or a header that are read.
    """
    rng, keys = draw(randoms), "000 001 002 003 004 005".split()
    pairs = [pair(key, i) for i, key in enumerate(keys)]
    whole, half = b"".join(pairs) + bytes(1024), len(b"".join(pairs[:3]))
    kind = draw(st.sampled_from(("names", "links", "cut", "bit", "end", "size", "gzip", "cut gzip", *GIANTS)))
    if kind == "names":
        odd = rng.sample(("../escape", "/tmp/escape", "a/../../b", "ä 犬", "a\nb", "-rf", "x.y.z", "<b>"), 3)
        return Tar(b"".join(map(pair, odd)) + whole, [*odd, *keys], False)
    if kind == "links":
        links = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE)
        return Tar(b"".join(member(f"{of.decode()}.png", kind=of) for of in links) + whole, keys, False)
    if kind == "bit":
        place = rng.choice((rng.randrange(512), half + rng.randrange(500)))
        return Tar(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1:], keys, True)
    if kind in GIANTS:
        limit = largest if kind.split()[-1] in ("png", "jpg", "npy") else largest_text
        size = limit + rng.choice((1, 2 ** 30, 2 ** 60) if "sparse" in kind else (0, 1, limit))
        data = whole[:half] + giant(kind, size) + whole[half:]
        data = gzip.compress(data, 1) if rng.random() < 0.5 else data
        return Tar(data, keys, size > limit, size > limit)
    size = whole[:half] + member("big.png", size=2 ** 33) + bytes(9000)
    packed = gzip.compress(whole)
    return Tar({"cut": whole[:rng.randrange(1, len(whole) - 1024)], "end": whole[:-1024], "size": size, "gzip": packed,
                "cut gzip": packed[:rng.randrange(1, len(packed))]}[kind], keys, True)


PARTS_OF_KEYS = ("v1", "0", "V2", "jpg", "2024-01-02", "com", "x y", "ä", "_", "crop", "png", "tar")
STEMS = ("img", "cat", "www", "a b", "犬", "IMG_0001", "in/photo", "d.ir/photo")
BESIDE = {"json": b"{}", "depth.png": png(1, 8), "cls": b"3", "mask.PNG": png(2, 8), "npy": b"no array"}


@st.composite
def shards(draw) -> tuple[bytes, dict[str, tuple[bytes, list[str]]]]:
    """Return a tar as others write it, and the image and captions of each key. Keys have dots."""
    rng, wanted, members = draw(randoms), {}, []
    for stem in rng.sample(STEMS, rng.randrange(1, 5)):
        keys = {".".join((stem, *rng.choices(PARTS_OF_KEYS, k=rng.choice((0, 0, 1, 1, 2))))) for _ in range(3)}
        for key in sorted(keys):
            kind = rng.choice(("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"))
            suffix, data = rng.choice((kind, kind.lower())), saved(noise(rng, 20, 12), kind)
            wanted[key] = data, rng.sample(WORDS[:4] + WORDS[9:11], rng.randrange(1, 4))
            own = [(f"{key}.{suffix}", data), (f"{key}.{rng.choice(('txt', 'TXT'))}", "\x1e".join(
                wanted[key][1]).encode(rng.choice(("utf-8", "utf-8-sig"))))]
            own += [(f"{key}.{name}", BESIDE[name]) for name in rng.sample(list(BESIDE), rng.choice((0, 0, 1, 2)))]
            members += rng.sample(own, len(own))
            if rng.random() < 0.2:  # what macOS adds
                folder, slash, name = key.rpartition("/")
                members.append((f"{folder}{slash}._{name}.jpg", b"\0\5\x16\7"))
    return tar(members), wanted


# ---- weights


def changed_header(whole: bytes, rng: Random) -> bytes:
    """A tensor of a safetensors file whose place, shape or type is another: none that fits the file."""
    size, = struct.unpack("<Q", whole[:8])
    content = json.loads(whole[8:8 + size])
    name = rng.choice([name for name in content if name != "__metadata__"])
    begin, end = content[name]["data_offsets"]
    content[name] |= rng.choice([
        {"data_offsets": [begin + 4, end]}, {"data_offsets": [begin, end + 4]}, {"data_offsets": [end, begin - 1]},
        {"data_offsets": [-1, end]}, {"data_offsets": []}, {"dtype": "F99"}, {"dtype": "F64"},
        {"shape": [*content[name]["shape"], 3]}, {"shape": [2 ** 62, 2 ** 62]}, {"shape": [-1]}, {"shape": None}])
    header = json.dumps(content).encode()
    return struct.pack("<Q", len(header)) + header + whole[8 + size:]


ROTS = ("bit", "block", "zeros", "cut", "longer", "joined", "size", "header", "not finite", "type", "key")


@st.composite
def damaged_weights(draw, state: dict[str, torch.Tensor], whole: bytes) -> tuple[str, bytes]:
    """Return a kind of ROTS and a safetensors file `whole` of the weights `state` after it."""
    kind, rng = draw(st.sampled_from(ROTS)), draw(randoms)
    place, name = rng.randrange(len(whole) - 8), rng.choice([n for n, x in state.items() if x.is_floating_point()])
    changed = state[name].clone()
    if kind == "not finite":
        changed.view(-1)[rng.randrange(changed.numel())] = float(rng.choice(("nan", "inf", "-inf")))
        return kind, save({**state, name: changed})
    if kind == "type":
        return kind, save({**state, name: changed.to(rng.choice((torch.int8, torch.float8_e4m3fn, torch.bool)))})
    if kind == "key":
        return kind, save({(f"{n}.other" if n == name else n): x for n, x in state.items()})
    if kind == "header":
        return kind, changed_header(whole, rng)
    size, = struct.unpack("<Q", whole[:8])
    return kind, {"bit": whole[:place] + bytes([whole[place] ^ (1 << rng.randrange(8))]) + whole[place + 1:],
                  "block": whole[:place] + rng.randbytes(min(4096, len(whole) - place)) + whole[place + 4096:],
                  "zeros": whole[:place] + bytes(len(whole) - place), "cut": whole[:place],
                  "longer": whole + rng.randbytes(rng.randrange(1, 5000)), "joined": whole + whole,
                  "size": struct.pack("<Q", rng.choice((size + 1, size - 1, 0, 1, 2 ** 63, len(whole)))) + whole[8:],
                  }[kind]


# ---- images


def noise(rng: Random, width: int, height: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))


@st.composite
def images(draw) -> bytes:
    """A picture of any format, mode, size and orientation that Pillow writes. Some are damaged."""
    rng, kind, mode = draw(randoms), draw(st.sampled_from(FOREIGN)), draw(st.sampled_from(MODES))
    exif = Image.Exif()
    exif[ORIENTATION] = draw(st.integers(1, 9))
    image = noise(rng, rng.randrange(1, 40), rng.randrange(1, 40))
    try:
        image = image.convert("L").convert(mode) if mode in ("I;16", "LA", "PA") else image.convert(mode)
        data = saved(image, kind, **{"exif": exif} if kind in ("JPEG", "PNG", "WEBP", "TIFF") else {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        data = saved(image.convert("RGB"), "PNG", exif=exif)
    return damage(data, rng) if draw(st.booleans()) else data


def decoded(data: bytes) -> np.ndarray | None:
    """Return an image as Pillow (numpy for 16-bit grey) gives it upright, or None if it cannot be read."""
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=READ) as image:
            warnings.simplefilter("ignore")
            if image.mode in ("I", "F") and image.format != "PNG":  # of which nothing says what is white
                return None
            if image.mode[0] == "I":  # 16 bits, of which Pillow's conversion makes white
                grey = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                grey.info = image.info
                return np.asarray(grey.convert("RGB"))
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception:
        return None


# ---- tables and texts


WORDS = ("a red circle", "None", "NA", "N/A", "nan", "null", "007", "1e5", "-", "café ☕", "犬", "TRUE", "=1+1", "it's",
         "#5", "a\\b", "\u2028", "inf")
MARKS = ('"', ",", ";", "\t", "\n", '"stop"', ' 12" wide', "'", "  ")


def caption(rng: Random) -> str:
    text = rng.choice(WORDS) + "".join(rng.choice((rng.choice(MARKS), f" {rng.choice(WORDS)}")) for _ in range(
        rng.choice((0, 0, 1, 2, 5))))
    return text.strip() or "a dog"


def comma(rows: list[tuple], rng: Random, **options) -> str:
    stream = io.StringIO()
    options |= {"delimiter": rng.choice(",;\t"), "lineterminator": rng.choice(("\n", "\r\n"))}
    csv.writer(stream, **options).writerows(rows)
    return stream.getvalue()


def r_table(rows: list[tuple], rng: Random) -> str:
    """R's write.table and write.csv, all texts in quotes."""
    escape = rng.choice(('\\"', '""'))
    separator = rng.choice("\t,") if escape == '""' else "\t"
    return "".join(separator.join('"{}"'.format(cell.replace('"', escape)) for cell in row) + "\n" for row in rows)


def pandas_table(rows: list[tuple], rng: Random) -> str:
    import pandas
    return pandas.DataFrame(rows[1:], columns=rows[0]).to_csv(index=rng.random() < 0.5, sep=rng.choice(",\t;"))


PROGRAMS = {"csv": comma, "Excel": comma, "all in quotes": lambda rows, rng: comma(rows, rng, quoting=csv.QUOTE_ALL),
            "R": r_table, "pandas": pandas_table}
ENCODINGS = {"csv": ("utf-8",), "Excel": ("utf-8-sig", "utf-16", "utf-16-be")}


class Table(NamedTuple):
    data: bytes
    rows: list[tuple[str, str]]
    damaged: bool


@st.composite
def tables(draw) -> Table:
    """Images and captions as a program writes them. Some files are damaged, some are packed."""
    program, rng = draw(st.sampled_from(list(PROGRAMS))), draw(randoms)
    names = [f"{rng.choice(('', 'in/', 'v1.'))}{i}.{rng.choice(('jpg', 'png'))}" for i in range(rng.randrange(1, 9))]
    rows = [(name, caption(rng)) for name in names]
    if program == "R":  # which writes a backslash as it is
        rows = [(name, text.replace("\\", "")) for name, text in rows]
    text = PROGRAMS[program]([rng.choice((("image", "caption"), ("filepath", "title"))), *rows], rng)
    encoding = rng.choice(ENCODINGS.get(program, ("utf-8", "utf-8-sig")))
    data = b"\xfe\xff" * (encoding == "utf-16-be") + text.encode(encoding)
    if draw(st.booleans()):
        return Table(gzip.compress(data) if rng.random() < 0.2 else data, rows, False)
    place = rng.randrange(len(data))
    return Table(rng.choice((
        data[:place], data + b'c.jpg,"open\n', data + b"c.jpg,caf\xe9\n", data + b"c.jpg,a,b\tc;d\n", data + b"c.jpg\n",
        data[:place] + bytes(9) + data[place:], data + b"\n\nfilepath\ttitle\nc.jpg\td\n")), rows, True)


HOSTILE = ("", " ", "\0", "a\0b", "\x1b[31mred\x1b[0m", "a\u2028b\x85c", "\ufeffa dog", "\u202egod a", "\u200b\u2060",
           "\u0301" * 200, "👩‍👩‍👧‍👦" * 10, "\U0010ffff\ufffe", "كلب يركض", "सुन",
           "<script>alert(1)</script>", "&lt;b&gt;", "<!--",
           "'; DROP TABLE c; --", "=1+1", '"', "a\n\n", "|a|", "\\", '{"caption": NaN}', "nan", "<start_of_text>",
           "<end_of_text> b", "[MASK] [MASK]", "a</w>b", "." * 500, "a" * 500, "!" * 20_000, "a red circle " * 40,
           "%s {} {0}", "$(ls) `ls`", "../../etc/passwd", "é " * 9000, "x " * 75, "x " * 76, "ﷺ" * 50, "İIıi", "ﬁ")
texts = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=30) | st.just("a red circle"), min_size=1, max_size=4
                 ).map(" ".join)
