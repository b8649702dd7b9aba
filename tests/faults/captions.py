"""Send hostile captions through tokenizer, training, scoring, prepare, the benchmark, and CSV, HTML and JSON output."""
import csv
import html
import json
import math
import unicodedata
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import torch
from world import (
    CLIP_BENCHMARK,
    MDC,
    RECAP,
    Cases,
    World,
    check_json,
    each,
    finite,
    first,
    strict_json,
    write_csv,
    write_shard,
)

import open_clip_mdc
from open_clip_mdc.data.shards import CAPTION_SEPARATOR, read_samples, tar_writer
from open_clip_mdc.text.special_tokens import decode_captions, decode_tokens, valid_tokens

CONTEXT = 77
FIXED = (
    "", " ", "\t\n", "\0", "a\0b", "\x1b[31mred\x1b[0m", "\x07\x08\x7f", "a\rb", "a\u2028b\u2029c",
    "a\x85b\x0bc\x0cd",
    "a\x1cb\x1db", "\ufeffa dog", "\u202egod a\u202c", "\u200b\u200d\u2060", "e\u0301" * 30, "\u0301" * 200,
    "👩‍👩‍👧‍👦" * 10, "🏳️‍🌈 🇺🇳", "\U0010ffff\ufffe\uffff", "\ue000", "ein Hündchen", "犬が走る",
    "كلب يركض", "कुत्ता", "สุนัข",
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "</main></body></html>", "<!--", "]]>", "&lt;b&gt;",
    "&#0;&#x1b;", "&amp;amp;amp;", "'; DROP TABLE captions; --", "=1+1", "=HYPERLINK(\"x\")", "a,b;c\td",
    '"', '""', '"a',
    "a\nb", "a\n\n\n", "|a|b|", "\\", "\\n\\u0000", "{'a': 1}", '{"caption": NaN}', "NaN", "nan", "null", "None", "inf",
    "1e999", "-0", "true", "<start_of_text>", "<end_of_text>", "<start_of_text>a<end_of_text> b", "[MASK]",
    "[MASK] [MASK]", "<end>", "a</w>b", "</w>", "!" * 5, "." * 500, "a" * 500, "!" * 100_000, "a red circle " * 40,
    "%s %d {} {0} %n", "${PATH} $(ls) `ls`", "../../etc/passwd", "C:\\a", "a" + " " * 100_000 + "b", "\n" * 1000,
    "word " * 100_000, "éè " * 100_000, "ß" * 300, "ﷺ" * 50, "\u0130I\u0131i", "ﬁ ﬂ", "Ｆｕｌｌ　ｗｉｄｔｈ",
    "x" * 76, "x " * 75, "x " * 76, "a red circle left of a blue square",
)


def hostile(world: World) -> list[str]:
    """World's number of captions: the fixed ones, then drawn mixtures, one word of 100,000 letters among them."""
    rng = world.rng("captions")
    fixed = [*FIXED, "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=100_000))]
    return list(islice(fixed, world.args.captions)) + [
        drawn(rng) for _ in range(world.args.captions - len(fixed))]


def drawn(rng: Random) -> str:
    """A mixture of short fixed ones, random characters of all planes, and words."""
    def characters() -> str:
        return "".join(chr(c) for c in (rng.randrange(0x110000) for _ in range(rng.randrange(1, 30)))
                       if not 0xd800 <= c < 0xe000)
    kinds = (characters, lambda: rng.choice([x for x in FIXED if len(x) < 60]),
             lambda: "".join(map(chr, rng.choices(range(32), k=5))), lambda: "a red circle",
             lambda: "".join(map(chr, rng.choices(range(0x300, 0x370), k=20))))
    return rng.choice(("", " ", "\n", ",")).join(rng.choice(kinds)() for _ in range(rng.randrange(1, 6)))


def named(captions: list) -> list[tuple[str, str]]:
    return [(f"{i} {ascii(caption[:40])}", caption) for i, caption in enumerate(captions)]


def for_all(captions: list, problem: str | None) -> Cases:
    """One case for each caption of a command that read all of them."""
    for i in range(len(captions)):
        yield ("all", problem) if i == 0 else (str(i), None)


def plain(caption: str) -> str:
    """White space as `prepare` and `score --pairs` write it."""
    return " ".join(caption.split())


def whole(caption: str, tokenizer) -> bool:
    """Return whether the model reads a caption to its end.

    <end_of_text> directly behind a punctuation mark or a combining mark is read as six tokens, and does not end it.
    """
    ids = tokenizer.encode(caption) if len(caption) < 2000 else [0] * CONTEXT
    return len(ids) + 2 <= CONTEXT and not {tokenizer.vocab_size - 2, tokenizer.vocab_size - 1} & set(ids)


def tokenize(world: World) -> Cases:
    """Check that ids are in the vocabulary and end in EOT, and that decoding and infilling give text or one line."""
    model = open_clip_mdc.load(str(world.run), device="cpu")
    image = torch.zeros(1, 3, 32, 32)
    tokenizer, size = model.tokenizer, model.tokenizer.vocab_size

    def check(caption: str) -> str | None:
        text = tokenizer(caption)
        valid = valid_tokens(text, size)
        ids = text[0, valid[0]]
        if text.shape != (1, CONTEXT) or not (0 <= int(text.min()) and int(text.max()) < size):
            return f"ids {list(text.shape)} from {int(text.min())} to {int(text.max())}"
        if ids[0] != size - 2 or ids[-1] != size - 1:
            return f"starts with {int(ids[0])}, ends with {int(ids[-1])}"
        if {size - 2, size - 1} & set(tokenizer.encode(caption)):
            return None  # it contains SOT or EOT: OpenCLIP cuts it there, and scoring must refuse it
        said, pieces = decode_captions(text, tokenizer)[0], "".join(decode_tokens(ids[1:-1].tolist(), tokenizer))
        if said != pieces.strip() and "\ufffd" not in said:
            return f"decoded as {said[:60]!r}, token by token as {pieces[:60]!r}"
        try:
            filled = model.caption(image, text=f"[MASK] {caption}")
        except ValueError as problem:
            return "more than a line" if "\n" in str(problem).strip() else None
        return None if isinstance(filled[0], str) else f"filled in: {filled!r}"

    yield from each(world, named(hostile(world)), check, world.fresh("captions-tokenizer"))


def finite_weights(folder: Path) -> str | None:
    path = next(folder.rglob("epoch_1.pt"), None)
    if path is None:
        return "no checkpoint"
    state = torch.load(path, weights_only=True)["state_dict"]
    return None if all(w.isfinite().all() for w in state.values()) else "weights that are not finite"


def train(world: World) -> Cases:
    """Train one epoch over shards and over a CSV file. The latter's empty captions are refused in one line."""
    folder, captions = world.fresh("captions-train"), hostile(world)
    images = [image for image, _ in world.samples]
    write_shard(folder / "0.tar", [("png", images[i % len(images)], caption.encode(errors="surrogatepass"))
                                   for i, caption in enumerate(captions)])
    ended = world.train("--train-data", folder / "0.tar", "--dataset-type", "webdataset", "--train-num-samples",
                        len(captions), "--batch-size", min(50, len(captions)), "--epochs", 1, cwd=folder, name="wds",
                        timeout=1200)
    yield from for_all(captions, first(ended.problem(0), finite_weights(folder / "wds")))
    rows = [(world.image_file(i % len(images)), caption) for i, caption in enumerate(captions)]
    write_csv(folder / "all.csv", rows, ("filepath", "title"), "\t")
    flags = ("--batch-size", 20, "--epochs", 1)
    ended = world.train("--train-data", folder / "all.csv", *flags, cwd=folder, name="refused")
    yield "an empty one in a CSV file", first(ended.problem(1), None if "without caption" in ended.err else
                                              ended.last_line())
    write_csv(folder / "some.csv", [row for row in rows if row[1].strip()], ("filepath", "title"), "\t")
    ended = world.train("--train-data", folder / "some.csv", *flags, cwd=folder, name="csv", timeout=1200)
    yield from for_all(captions, first(ended.problem(0), finite_weights(folder / "csv")))


def score(world: World) -> Cases:
    """Score each caption for an image, as CSV and JSONL, and read these back.

    Too long a caption is refused in one line.
    """
    folder, tokenizer = world.fresh("captions-score"), open_clip_mdc.load(str(world.run), device="cpu").tokenizer
    lines = [caption.strip() for caption in hostile(world) if not set("\r\n") & set(caption) and caption.strip()]
    fit = [line for line in lines if whole(line, tokenizer)]
    argv = ("--images", world.images / "00.png", "--blind-images", world.images)
    for name, some in (("all", lines), ("fit", fit)):
        (folder / f"{name}.txt").write_bytes("".join(f"{line}\n" for line in some).encode(errors="surrogatepass"))
    ended = world.tool("score", *argv, "--captions", folder / "all.txt", "--out", folder / "no.csv", cwd=folder,
                       run=world.arc, timeout=1200)
    yield "too long ones", first(ended.problem(0 if len(fit) == len(lines) else 1), None if len(fit) == len(lines)
                                 or "tokens" in ended.err else ended.last_line())
    for suffix in (".csv", ".jsonl"):
        path = folder / f"scores{suffix}"
        ended = world.tool("score", *argv, "--captions", folder / "fit.txt", "--out", path, cwd=folder,
                           run=world.arc, timeout=1200)
        if problem := first(ended.problem(0), check_json(folder)):
            yield suffix, problem
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file)) if suffix == ".csv" else [strict_json(line) for line in file]
        yield f"{suffix}: rows", None if len(rows) == len(fit) else f"{len(rows)} rows of {len(fit)} captions"
        for row, (name, caption) in zip(rows, named(fit), strict=False):
            value, prior, debiased = (float(row[key]) for key in ("score", "blind", "debiased"))
            yield f"{suffix}: {name}", first(
                None if row["caption"] == caption else f"became {row['caption'][:60]!r}",
                None if finite(value, prior, debiased) and math.isclose(debiased, value - prior, abs_tol=1e-4) else
                f"{value}, {prior}, {debiased}")


def pairs(world: World) -> Cases:
    """Score a data set's own captions, from shards and from a CSV file. Captions that are too long have no score."""
    folder, captions = world.fresh("captions-pairs"), hostile(world)
    images = [image for image, _ in world.samples]
    tokenizer = open_clip_mdc.load(str(world.run), device="cpu").tokenizer
    write_shard(folder / "shard.tar", [("png", images[i % len(images)], caption) for i, caption in
                                       enumerate(captions)])
    write_csv(folder / "file.csv", [(world.image_file(i % len(images)), caption) for i, caption in
                                    enumerate(captions)])
    for source, table in (("shard.tar", "shard.parquet"), ("file.csv", "file-00000.parquet")):
        out = folder / source.replace(".", "-")
        ended = world.tool("score", "--pairs", folder / source, "--blind-images", world.images, "--out", out,
                           cwd=folder, run=world.arc, timeout=1200)
        if problem := ended.problem(1):  # blank ones are named and left out
            yield source, problem
            continue
        rows = pq.read_table(out / table).to_pylist()
        expected = [(name, plain(part)) for name, caption in named(captions)
                    for part in caption.split(CAPTION_SEPARATOR) if part.strip()]
        yield f"{source}: rows", None if len(rows) == len(expected) else f"{len(rows)} rows, not {len(expected)}"
        for row, (name, caption) in zip(rows, expected, strict=False):
            fits = whole(caption, tokenizer)
            values = [row[key] for key in ("score", "blind", "debiased")]
            yield f"{source}: {name}", first(
                None if row["caption"] in (caption, caption.removeprefix("\ufeff")) else
                f"became {row['caption'][:60]!r}",
                None if (values == [None] * 3) != fits and (not fits or finite(*values)) else f"{values}, {fits}")


class Page(HTMLParser):
    """The headings and the tags of a page."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.headings, self.tags, self.within = [], set(), False

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.within = tag == "h2"
        if self.within:
            self.headings.append("")

    def handle_endtag(self, tag):
        self.within = False

    def handle_data(self, data):
        if self.within:
            self.headings[-1] += data


def pages(world: World) -> Cases:
    """File names made of them, and captions beside ours on a page: text stays text, and JSON stays JSON."""
    folder, captions = world.fresh("captions-pages"), hostile(world)
    images = folder / "images"
    images.mkdir()
    names = {}
    for i, caption in enumerate(captions):
        stem = caption.replace("/", "_").replace("\0", "_").encode()[:80]  # may break off within a letter
        path = Path(f"{images}/{i:04d}" + stem.decode("utf-8", "surrogateescape") + ".png")
        path.write_bytes(world.samples[i % len(world.samples)][0])
        names[str(path)] = caption
    with (folder / "other.jsonl").open("w") as file:
        for name, caption in names.items():
            file.write(json.dumps({"image": name, "caption": caption, "tokens": [
                {"token": caption[:1000], "step": 0, "log_prob": -1.0}]}) + "\n")
    ended = world.tool("caption", images, "--out", "out.jsonl", "--html", "out.html", "--length", 2, "--compare",
                       "other.jsonl", cwd=folder, timeout=1200)
    if problem := first(ended.problem(0), check_json(folder)):
        yield "all", problem
        return
    rows = [strict_json(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    text = (folder / "out.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    controls = sorted({c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"})
    known = {"html", "head", "meta", "title", "style", "body", "header", "h1", "dl", "div", "dt", "dd", "p", "ul", "li",
             "i", "main", "article", "img", "h2", "table", "tr", "th", "td"}
    yield "the page", first(f"controls {controls}" if controls else None,
                            f"tags {page.tags - known}" if page.tags - known else None,
                            None if {row["image"] for row in rows} == names.keys() else "other images")
    headings = {row["image"]: heading for row, heading in zip(rows, page.headings[1::2], strict=True)}
    for (name, caption), path in zip(named(captions), names, strict=True):
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in caption)
        found = headings.get(path)
        yield name, None if found == (shown or "(no words)") else f"shown as {html.escape(str(found))[:80]}"


def prepare(world: World) -> Cases:
    """KEY.json to KEY.txt, lone surrogates included: what has no text is left out and listed."""
    folder = world.fresh("captions-prepare")
    captions = [*hostile(world), "\ud800", "a \udfff dog"]
    image = world.samples[0][0]
    with tar_writer(folder / "in.tar") as writer:
        for i, caption in enumerate(captions):
            writer.write({"__key__": f"{i:06d}", "png": image, "json": json.dumps({
                "captions": [caption], "re_caption": caption, "filename": f"{i}"}).encode()})
    expected = [(str(i), plain(caption)) for i, caption in enumerate(captions)
                if caption.strip() and not any("\ud800" <= c <= "\udfff" for c in caption)]
    for name, argv in (("shards", (MDC, "prepare", "shards", "--train", folder / "in.tar", "--skip-broken")),
                       ("recap", (RECAP, "--shards", folder / "in.tar", "--pairs", len(expected)))):
        ended = world.call(*argv, "--out", folder / name, cwd=folder)
        if problem := first(ended.problem(0), check_json(folder / name)):
            yield name, problem
            continue
        shard = next((folder / name).rglob("*.tar"))
        found = {json.loads(sample["json"])["filename"]: sample["txt"].decode() for sample in read_samples(str(shard))}
        yield f"{name}: rows", None if len(found) == len(expected) else f"{len(found)} rows, not {len(expected)}"
        for number, caption in expected:
            yield f"{name}: {number}", None if found.get(number) == caption else f"became {found.get(number)!r:.80}"


def evaluate(world: World) -> Cases:
    """References of captioning and wrong captions of a selection: a result of finite numbers, or one line."""
    folder, captions = world.fresh("captions-eval"), hostile(world)
    (folder / "wds" / "test").mkdir(parents=True)
    (folder / "wds" / "test" / "nshards.txt").write_text("1")
    text = [caption for caption in captions if caption.strip() and len(caption) < 2000]
    write_shard(folder / "wds" / "test" / "0.tar", [("png", world.samples[i % len(world.samples)][0], caption)
                                                    for i, caption in enumerate(text)])
    common = ("--model", "arc", "--pretrained", world.arc, "--num_workers", 0, "--no_amp", "--quiet")
    ended = world.call(CLIP_BENCHMARK, "eval", *common, "--dataset", "wds/x", "--dataset_root", folder / "wds",
                       "--task", "captioning", "--caption_length", 3, "--num_beams", 1, "--output",
                       folder / "captioning.json", cwd=folder, timeout=1200)
    yield from for_all(text, first(ended.problem(0), check_json(folder)))
    fit = [caption for caption in text if len(caption) < 60]
    crepe = folder / "crepe"
    (crepe / "images").mkdir(parents=True)
    (crepe / "images" / "0.png").write_bytes(world.samples[0][0])
    for name, some in (("swap_obj", fit), ("swap_att", ["word " * 1000])):  # is cut, as OpenCLIP cuts it
        (crepe / f"{name}.json").write_text(json.dumps({str(i): {
            "filename": "0.png", "caption": "a red circle", "negative_caption": caption}
            for i, caption in enumerate(some)}))
        ended = world.call(CLIP_BENCHMARK, "eval", *common, "--dataset", f"sugar_crepe/{name}", "--dataset_root", crepe,
                           "--output", folder / f"{name}.json", cwd=folder, timeout=1200)
        yield from for_all(some, first(ended.problem(0), check_json(folder)))


PARTS = {"captions: tokenizer, infilling": tokenize, "captions: training": train,
         "captions: score, CSV and JSON": score, "captions: score --pairs": pairs,
         "captions: JSON, HTML and file names": pages, "captions: prepare": prepare,
         "captions: clip_benchmark": evaluate}
