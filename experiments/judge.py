"""Let an LLM choose the best of several systems' captions for each image, for the selection rates of Table 3.

    export OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_MODEL=Qwen/Qwen2.5-VL-72B-Instruct OPENAI_API_KEY=...
    python -m experiments.judge --captions MDC-10=mdc10.json ARC=arc.json --images photos/ --out judge.jsonl

Any OpenAI-compatible chat endpoint can be the judge. It sees the image, the question and the captions as "A. ...",
"B. ...", in an order drawn from the seed and the image's id alone. Equal captions are shown once and share the vote.
Each answer is written to --out at once, and the same command resumes an interrupted run. The selection rates go into a
.json beside it. They are over the answers that name one caption. Other answers are counted as malformed.
"""
import argparse
import hashlib
import io
import json
import os
import sys
import tarfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import requests
from PIL import ExifTags, Image
from requests.adapters import HTTPAdapter, Retry

from open_clip_mdc.cli.arguments import SHARDS
from open_clip_mdc.cli.shared import natural, positive
from open_clip_mdc.data.files import parse_json
from open_clip_mdc.data.images import data_url, decode_image, encode_png
from open_clip_mdc.data.journal import Journal, check_journal
from open_clip_mdc.data.outputs import APPENDED, BESIDE
from open_clip_mdc.data.paths import find_images, formats, is_shard
from open_clip_mdc.data.shards import Header, TooLarge, check_size, files_of, group_by_key, image_member, regroup
from open_clip_mdc.data.text import read_lines, read_text, unique
from open_clip_mdc.progress import progress_bar

from . import tool
from .judge_answers import LETTERS, assign_letters, parse_letter, report, summarise

TIMEOUT_SECONDS = (10, 300)  # to connect, and between two bytes: a large model with a queue is slow
ANSWER_SECONDS, ANSWER_BYTES = 900, 2 ** 20  # limits of a whole answer
QUESTION = "Which caption best depicts the image and is also coherent (no duplicate words or awkward phrasing)?"
# Media types that servers accept, by Pillow's format. An MPO is a JPEG of several pictures.
SERVED = {"JPEG": "image/jpeg", "MPO": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp", "GIF": "image/gif"}
RETRIES = 7  # after 0, 1, 2, 4, ... 32 seconds, unless the server says how long to wait


class Place(NamedTuple):
    """A file, or the part of a tar file, that holds an image's bytes."""

    path: Path
    offset: int = 0
    size: int = -1

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def sha256(self) -> str:
        return hashlib.sha256(self.read()).hexdigest()


def read_captions(path: str) -> dict[str, str]:
    """Read {id: caption} from a file. Line breaks become spaces, so that no caption can look like two."""
    try:
        if path.endswith(".jsonl"):
            rows = [parse_json(line) for line in read_lines(path)]
            pairs = [(row["image"].partition("::")[2] or Path(row["image"]).stem, row["caption"]) for row in rows]
        else:
            pairs = list(parse_json(read_text(path))["captions"].items())
        captions = {id: " ".join(caption.split()) for id, caption in pairs}
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f'{path} is neither JSON with {{"captions": {{id: caption}}}} nor .jsonl with "image" and '
                         f'"caption" ({type(problem).__name__}: {problem})') from problem
    if len(captions) < len(pairs):
        twice = Counter(id for id, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{path} has more than one caption for {twice}")
    return captions


def read_systems(arguments: list[str]) -> dict[str, dict[str, str]]:
    """Read {system: {id: caption}} of NAME=FILE arguments, with the same ids in all."""
    pairs = [argument.partition("=")[::2] for argument in arguments]
    if not all(name and file for name, file in pairs) or len(dict(pairs)) < len(pairs):
        raise ValueError(f"--captions {' '.join(arguments)}: give each system once, as NAME=FILE")
    if not 2 <= len(pairs) <= len(LETTERS):
        raise ValueError(f"--captions names {len(pairs)} systems, not 2 to {len(LETTERS)}")
    systems = {name: read_captions(file) for name, file in pairs}
    (first, reference), *others = systems.items()
    for name, captions in others:
        if unlike := sorted(captions.keys() ^ reference.keys()):
            raise ValueError(f"{first} and {name} caption different images: {len(unlike)} ids are in only one of "
                             f"them, such as {unlike[0]}")
    if not reference:
        raise ValueError(f"{pairs[0][1]} has no caption")
    return systems


def _shard_images(shard: Path) -> dict[str, Place]:
    members, found = [], {}
    try:
        with tarfile.open(shard, "r:", tarinfo=Header) as archive:
            for member in files_of(archive):
                check_size(member)
                members.append((member.name, Place(shard, member.offset_data, member.size)))
    except tarfile.TarError as problem:
        raise ValueError(f"{shard}: not a complete, uncompressed tar file ({str(problem) or 'a size below 0'})") \
            from problem
    except TooLarge as problem:
        raise ValueError(f"{shard}: {problem}") from problem
    for sample in regroup(group_by_key(members)):
        if suffix := image_member(sample):
            found.setdefault(sample["__key__"], sample[suffix])
    return found


def find_places(source: str, ids: set[str]) -> dict[str, Place]:
    """Return {id: place}. An id is a name in a folder, or a key or else a sample's number from 0 in shards."""
    found: list[tuple[str, Place]] = []
    keys = set()
    for path in find_images([source]):
        shard = is_shard(path)
        images = _shard_images(path) if shard else {path.stem: Place(path)}
        for key, place in images.items():
            # The captioning task renames a key like this that comes again in a later shard.
            found.append((unique(key, len(found), keys) if shard else key, place))
    if shard and not ids <= dict(found).keys() and ids == {str(i) for i in range(len(ids))}:
        found = [(str(i), place) for i, (_, place) in enumerate(found)]
    counts = Counter(id for id, _ in found)
    if wrong := sorted(id for id in ids if counts[id] != 1):
        raise ValueError(f"--images {source} has {counts[wrong[0]] or 'no'} images for the id {wrong[0]} "
                         f"({len(wrong)} of {len(ids)} ids have none or several)")
    return {id: place for id, place in found if id in ids}


def read_url(place: Place) -> str:
    """Return an image as a data URL: the file's own bytes, or a PNG if it is not upright or few servers read it."""
    content = place.read()
    try:
        with Image.open(io.BytesIO(content), formats=formats()) as image:
            if image.getexif().get(ExifTags.Base.Orientation, 1) == 1 and image.format in SERVED:
                return data_url(content, SERVED[image.format])
        return data_url(encode_png(decode_image(io.BytesIO(content))), "image/png")
    except (OSError, SyntaxError, Image.DecompressionBombError) as problem:
        raise ValueError(f"cannot read the image at byte {place.offset} of {place.path}: {problem}") from problem


def open_session(workers: int) -> requests.Session:
    session = requests.Session()
    retry = Retry(RETRIES, status_forcelist=(429, *range(500, 600)), allowed_methods=None, backoff_factor=0.5,
                  raise_on_status=False)
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_maxsize=workers, max_retries=retry))
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("$OPENAI_API_KEY has characters that a key cannot have: set it again")
    if key:
        def authorise(request):  # a header of the session would be overridden by a ~/.netrc
            request.headers["Authorization"] = f"Bearer {key}"
            return request
        session.auth = authorise
    return session


def read_answer(response: requests.Response) -> bytes:
    # A slow or endless answer must not hold up the others for ever.
    content, deadline = bytearray(), time.monotonic() + ANSWER_SECONDS
    for part in response.iter_content(16):  # few, as it waits for all bytes of a part, but one each would be slow
        content += part
        if len(content) > ANSWER_BYTES or time.monotonic() > deadline:
            raise ValueError(f"{response.url} sends an endless answer: {len(content)} bytes so far")
    return bytes(content)


def _excerpt(response: requests.Response, content: bytes) -> str:
    # without the key, which some servers repeat
    key = response.request.headers.get("Authorization", "").removeprefix("Bearer ")
    text = " ".join(content.decode(errors="replace").split())
    return (text.replace(key, "***") if key else text)[:300]


def ask(session: requests.Session, url: str, model: str, prompt: str, image: str) -> str:
    content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": prompt}]
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    try:
        with session.post(f"{url}/chat/completions", json=body, timeout=TIMEOUT_SECONDS, allow_redirects=False,
                          stream=True) as response:
            content = read_answer(response)
    except (requests.RequestException, UnicodeError) as problem:
        raise OSError(f"{url} cannot be reached after {RETRIES} retries: {problem}") from problem
    if response.status_code != 200:
        raise ValueError(f"{url} answers {response.status_code}: {_excerpt(response, content)}")
    try:
        return (parse_json(content)["choices"][0]["message"]["content"] or "").strip()
    except (ValueError, LookupError, TypeError, AttributeError) as problem:
        raise ValueError(f"{url} does not answer with a chat completion: {_excerpt(response, content)}") from problem


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    for value, flag, variable in ((args.url, "--url", "OPENAI_BASE_URL"), (args.model, "--model", "OPENAI_MODEL")):
        if not value:
            raise ValueError(f"no judge endpoint: give {flag} or set ${variable}")
    systems = read_systems(args.captions)
    ids = list(next(iter(systems.values())))
    images = find_places(args.images, set(ids))
    digests = {name: hashlib.sha256(json.dumps(captions, sort_keys=True).encode()).hexdigest()
               for name, captions in systems.items()}
    settings = {"question": QUESTION, "model": args.model, "seed": args.seed, "systems": digests}
    session = open_session(args.workers)
    check_journal(out, settings)

    def vote_on(id: str) -> dict:
        choices = assign_letters({name: captions[id] for name, captions in systems.items()}, args.seed, id)
        texts = [text for text, _ in choices]
        answer, letter = None, "A"
        if len(choices) > 1:
            lines = [f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False)]
            answer = ask(session, args.url.rstrip("/"), args.model, "\n".join([QUESTION, *lines]),
                         read_url(images[id]))
            letter = parse_letter(answer, texts)
        return {"id": id, "image": images[id].sha256(), "url": args.url, "shown": [names for _, names in choices],
                "answer": answer, "chosen": choices[LETTERS.index(letter)][1] if letter else []}

    with Journal(out, settings) as journal, ThreadPoolExecutor(args.workers) as pool:
        # Rows of older versions, which cost money, do not say of which image they are.
        known = {id for id, row in journal.items() if id in images and row.get("image") in (
            None, images[id].sha256())}
        if elsewhere := {row["url"] for row in journal.values() if row.get("url", args.url) != args.url}:
            print(f"warning: {out} also has answers of {', '.join(sorted(elsewhere))}", file=sys.stderr)
        lock, stop = threading.Lock(), threading.Event()

        def record(id: str) -> None:
            if stop.is_set():
                return
            try:
                vote = vote_on(id)
            except BaseException:
                stop.set()
                raise
            with lock:
                journal.note(vote)

        futures = [pool.submit(record, id) for id in ids if id not in known]
        try:
            for future in progress_bar(as_completed(futures), "judge", total=len(ids), initial=len(ids) - len(futures)):
                future.result()
        finally:
            stop.set()  # after a failure or Ctrl-C, only answers that are under way are still recorded

    report(out, out.with_suffix(".json"), settings, summarise(list(journal.values()), list(systems)))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--captions", required=True, nargs="+", metavar="NAME=FILE",
                        help='name of each system and file of its captions: .json with {"captions": {id: caption}}, or '
                             "the .jsonl of open_clip_mdc caption (where the id is the file's name without suffix, or "
                             "the shard's key)")
    parser.add_argument("--images", required=True,
                        help=f"folder of images named by id, or {SHARDS}, whose keys or sample numbers (0, 1, ...) are "
                             "the ids")
    parser.add_argument("--out", default="judge.jsonl", help="file of the answers, one per line (default: %(default)s)")
    parser.add_argument("--url", default=os.environ.get("OPENAI_BASE_URL"),
                        help="address of the endpoint up to /v1, whose key is in $OPENAI_API_KEY (default: "
                             "$OPENAI_BASE_URL)")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL"),
                        help="name of the judge's model at the endpoint (default: $OPENAI_MODEL)")
    parser.add_argument("--seed", type=natural, default=0,
                        help="random seed of the captions' order (default: %(default)s)")
    parser.add_argument("--workers", type=positive, default=4,
                        help="number of requests at a time (default: %(default)s)")


def main(argv: list[str] | None = None) -> None:
    name = "experiments.judge"
    BESIDE[name] = lambda out: out.with_suffix(".json")  # the report
    APPENDED.add(name)
    tool.main(name, __doc__, add_flags, run, {"out": (".jsonl",)}, argv)


if __name__ == "__main__":
    main()
