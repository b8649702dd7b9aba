"""Download data sets to train and test on, and print the commands for what cannot be downloaded directly.

    open_clip_mdc fetch coco --out data/coco
    open_clip_mdc fetch recap --out data/recap --print       # only print what there is and what to run

An interrupted download resumes when the same command is run again, as long as the server's file is the same. A file
gets its name once it is complete and has the published checksum, if there is one (COCO's by LAVIS, Flickr8k's by
mlverse), or else is of the kind that its suffix says, and no page about an error. A file that is there is checked, too.
"""
import argparse
import hashlib
import json
import os
import tarfile
import time
import zipfile
import zlib
from collections.abc import Sequence
from glob import escape
from pathlib import Path
from typing import NamedTuple

import requests

from ..data.files import hash_file, open_own, parse_json
from ..data.paths import for_shell
from ..progress import progress_bar

TRIES = 5  # in a row without a new byte
TIMEOUT = 60  # seconds


class File(NamedTuple):
    url: str
    size: str = ""  # rounded
    checksum: str | None = None  # ALGORITHM:HEX

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


class Source(NamedTuple):
    licence: str
    files: Sequence[File] = ()
    commands: Sequence[str] = ()  # to run by hand after the download, where OUT is the folder


SOURCES = {name: Source(**{**row, "files": [File(**file) for file in row.get("files", ())]})
           for name, row in json.loads(Path(__file__).with_name("fetch.json").read_bytes()).items()}


def is_json(path: Path) -> bool:
    try:
        return bool(parse_json(path.read_bytes()))
    except ValueError:
        return False


def is_tar(path: Path) -> bool:
    try:
        return tarfile.is_tarfile(path)
    except (EOFError, zlib.error):  # compressed, but not to the end
        return False


def is_tsv(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(2 ** 20).strip()
    return b"\t" in first and not first.startswith(b"<")


KINDS = {".zip": zipfile.is_zipfile, ".tgz": is_tar, ".json": is_json, ".tsv": is_tsv}


def ask(url: str, **headers: str) -> requests.Response:
    try:
        return requests.get(url, stream=True, timeout=TIMEOUT, headers={"Accept-Encoding": "identity", **headers})
    except (requests.exceptions.InvalidSchema, requests.exceptions.InvalidURL, requests.TooManyRedirects) as problem:
        raise ValueError(f"{url} sends on to an address that cannot be fetched: {problem}") from problem


def identity(file: File, answer: requests.Response) -> str:
    # Tells this file from a later one at the same address. Redirects are left out, as their signatures change.
    known = [file.url, *(answer.headers.get(name, "") for name in ("ETag", "Last-Modified", "Content-Length"))]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]


def append(url: str, part: Path, bar) -> None:
    """Download what `part` lacks, or all if the server sends no part of a file."""
    start = part.stat().st_size if part.exists() else 0
    answer = ask(url, **({"Range": f"bytes={start}-"} if start else {}))
    if answer.status_code == 206 and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        answer.close()
        answer = ask(url)
    with answer:
        if answer.status_code == 416:  # the file is complete
            return
        answer.raise_for_status()
        with open_own(part, "ab" if answer.status_code == 206 else "wb") as file:
            bar.n = file.tell()
            for block in answer.iter_content(2 ** 16):
                bar.update(file.write(block))


def download(file: File, folder: Path) -> Path:
    """Download the file unless it is there, and return its path.

    Raises OSError if the server breaks off too often, ValueError for a wrong size, checksum or kind.
    """
    target, tries, size = folder / file.name, 0, -1
    if target.exists():
        if problem := find_problem(file, target, None):
            raise ValueError(f"{target} {problem}: remove it, and run the same command to fetch it again")
        return target
    with ask(file.url) as head:
        head.raise_for_status()
        part = folder / f".{file.name}.{identity(file, head)}.part"
        length = head.headers.get("Content-Length")
        if length is not None and not length.isdecimal():
            raise ValueError(f"{file.url} answers with a Content-Length of {length!r}, which is no number")
    with progress_bar(total=length and int(length), what=file.name, unit="B", unit_scale=True) as bar:
        while True:
            try:
                append(file.url, part, bar)
                break
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as problem:
                before, size = size, part.stat().st_size if part.exists() else 0
                tries = 0 if size > before else tries + 1
                if tries == TRIES:
                    raise OSError(f"{file.url} broke off {TRIES} times at byte {size}: run the same command to resume "
                                  f"({problem})") from problem
                time.sleep(tries)
    if problem := find_problem(file, part, length):
        part.unlink()
        raise ValueError(f"{file.url} {problem}: it was removed, run the same command to fetch it again")
    os.replace(part, target)
    for other in folder.glob(f".{escape(file.name)}.{'?' * 12}.part"):  # parts of an earlier version
        other.unlink(missing_ok=True)
    return target


def find_problem(file: File, part: Path, length: str | None) -> str | None:
    if length is not None and part.stat().st_size != int(length):
        return f"has {part.stat().st_size} bytes, not {length}"
    if file.checksum:
        algorithm, _, wanted = file.checksum.partition(":")
        if (found := hash_file(part, algorithm)) != wanted:
            return f"has the {algorithm} {found}, not {wanted}"
    elif not KINDS[Path(file.name).suffix](part):
        with part.open("rb") as content:
            return f"is no {Path(file.name).suffix} file: it begins with {content.read(40)!r}"
    return None


def run(args: argparse.Namespace) -> None:
    source, folder = SOURCES[args.source], Path(args.out)
    commands = [command.replace("OUT", for_shell(args.out)) for command in source.commands]
    print(f"licence: {source.licence}")
    if args.print:
        for file in source.files:
            size = f" ({file.size})" if file.size else ""
            print(f"{file.url}{size} {file.checksum or '(no checksum known)'}")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.files:
            print(download(file, folder))
        commands = ["then run:", *commands] if commands else []
    print(*commands, sep="\n", end="\n" * bool(commands))
