"""Claims about `open_clip_mdc caption` and its page, in a real browser where there is one.

The models are the real ones of the scenes, untrained, with an output layer large enough to have opinions.
"""
import http.server
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from math import log
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import run_folder
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image
from safetensors.torch import save_file
from shard_files import write_tar

from open_clip_mdc import checkpoints
from open_clip_mdc import tools as cli
from open_clip_mdc.clip_guidance import Clip, Guide
from open_clip_mdc.data import images
from open_clip_mdc.model import Captioner
from open_clip_mdc.tokens import decode_captions, decode_tokens, eot_id, mask_id, sot_id
from open_clip_mdc.tools import page as report
from open_clip_mdc.tools.caption import read_captions

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run folders as open_clip_train leaves them, and the weights of a CLIP model of the scenes."""
    folder = tmp_path_factory.mktemp("runs")
    for alias, name in (("mdc", "MDC-ViT-Ti-8"), ("arc", "ARC-ViT-Ti-8"), ("mcs", "MCD-ViT-Ti-8-mcs"),
                        ("cfg", "MCD-ViT-Ti-8-cfg")):
        run_folder(folder / alias, name)
    torch.manual_seed(3)
    clip = open_clip.create_model("ViT-Ti-8")
    torch.nn.init.normal_(clip.text_projection if hasattr(clip, "text_projection") else clip.text.text_projection)
    torch.save(clip.state_dict(), folder / "clip.pt")
    return folder


def scene(number: int) -> Image.Image:
    """Noise or a plain colour, the same at every call."""
    noise = torch.randint(0, 256, (40, 36, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
    return Image.fromarray(noise.numpy()) if number % 2 else \
        Image.new("RGB", (32, 48), (20 * number, 255 - 20 * number, 90))


def encoded(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Seven images: two in a folder, two that a pattern finds, one by name, two in shards. The working directory."""
    monkeypatch.chdir(tmp_path)
    Path("deep/er").mkdir(parents=True)
    for number, name in enumerate(("deep/a.png", "deep/er/b.JPG", "x1.png", "x2.png", "holiday[1].png")):
        scene(number).save(name, "png")
    for number in (5, 6):
        write_tar(Path(f"{number}.tar"), {f"in/key{number}.txt": b"words",
                                          f"in/key{number}.png": encoded(scene(number))})
    return tmp_path


PATHS = ("deep", "x?.png", "holiday[1].png", "{5..6}.tar")
NAMES = ("deep/a.png", "deep/er/b.JPG", "x1.png", "x2.png", "holiday[1].png", "5.tar::in/key5", "6.tar::in/key6")


def run(*argv) -> str | None:
    """The tool's complaint, None if it has none."""
    try:
        cli.main(["caption", *map(str, argv), "--device", "cpu"])
    except SystemExit as end:
        return end.code
    return None


def lines(path="captions.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def loaded(run):
    return checkpoints.load(str(run))


# ---- the lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias, options, arguments", [
    ("mdc", {}, ()),
    ("mdc", dict(length="auto", tokens_per_step=3), ("--length", "auto", "--tokens-per-step", "3")),
    ("arc", dict(length=6), ("--length", "6")),
], ids=["mdc", "auto", "arc"])
def test_every_image_gets_the_caption_that_it_gets_alone(runs, folder, capsys, alias, options, arguments):
    assert run("--pretrained", runs / alias, *PATHS, "--batch-size", "3", *arguments) is None
    printed = capsys.readouterr().out.splitlines()
    model, transform, tokenizer = loaded(runs / alias)
    rows = lines()
    assert [row["image"] for row in rows] == list(NAMES)
    for number, row in enumerate(rows):
        alone = model.generate(transform(scene(number))[None], **options)
        assert row["caption"] == decode_captions(alone, tokenizer)[0]
        assert printed[number] == report.printable(f"{row['image']}: {row['caption']}")
    assert len({row["caption"] for row in rows}) > 1
    assert sorted(os.listdir()) == sorted(["5.tar", "6.tar", "captions.jsonl", "deep", "holiday[1].png", "x1.png",
                                           "x2.png"])


def test_steps_and_probabilities_are_those_of_the_model(runs, folder):
    """The first step by a look at a hidden caption, the last by one in which only its token is hidden."""
    run("--pretrained", runs / "mdc", "x1.png", "--length", "6")
    model, transform, tokenizer = loaded(runs / "mdc")
    (row,) = lines()
    tokens = row["tokens"]
    assert sorted(token["step"] for token in tokens) == list(range(6))
    size, image = model.vocab_size, transform(scene(2))[None]
    hidden = torch.tensor([[sot_id(size), *[mask_id(size)] * 6, eot_id(size)]])
    log_probs = model.logits(image, hidden).detach()[0, 1:7].log_softmax(1)
    full, best = log_probs[:, :sot_id(size)].max(1)
    first = int(full.argmax())
    assert tokens[first]["step"] == 0
    assert tokens[first]["token"] == decode_tokens([int(best[first])], tokenizer)[0]
    assert tokens[first]["log_prob"] == pytest.approx(float(full[first]), abs=1e-5)
    text = model.generate(image, length=6)
    last = next(i for i, token in enumerate(tokens) if token["step"] == 5)
    masked = text.clone()
    masked[0, last + 1] = mask_id(size)
    log_prob = model.logits(image, masked).detach()[0, last + 1].log_softmax(0)[text[0, last + 1]]
    assert tokens[last]["log_prob"] == pytest.approx(float(log_prob), abs=1e-5)


def test_a_caption_written_left_to_right_adds_up_to_its_likelihood_with_its_end(runs, folder):
    run("--pretrained", runs / "arc", "x1.png", "--length", "6")
    model, transform, tokenizer = loaded(runs / "arc")
    (row,) = lines()
    image = transform(scene(2))[None]
    likelihood = model.log_likelihood(image, model.generate(image, length=6))
    assert sum(token["log_prob"] for token in row["tokens"]) == pytest.approx(float(likelihood), abs=1e-4)
    assert [token["step"] for token in row["tokens"]] == list(range(len(row["tokens"])))
    assert row["tokens"][-1]["token"] == "<end>"


def test_a_caption_has_the_least_length_that_is_asked_for(runs, folder):
    run("--pretrained", runs / "arc", *PATHS, "--length", "9", "--min-length", "8")
    assert {len(row["tokens"]) - (row["tokens"][-1]["token"] == "<end>") for row in lines()} <= {8, 9}


def test_words_that_are_given_stay_and_have_neither_step_nor_probability(runs, folder):
    run("--pretrained", runs / "mdc", "x1.png", "x2.png", "--text", "a [MASK] circle left of [MASK]")
    for row in lines():
        given = [token["token"] for token in row["tokens"] if token["step"] is None]
        assert given == ["a ", "circle ", "left ", "of "]
        assert {token["step"] for token in row["tokens"]} == {None, 0, 1}
        assert all((token["step"] is None) == (token["log_prob"] is None) for token in row["tokens"])


def test_the_tokens_of_a_caption_in_any_script_put_together_are_the_caption():
    tokenizer = SimpleTokenizer()
    for text in ("two skateboarders kickflipping", "naïve überraschend", "東京 の 夜 🦄 🏳", "a < script > & \" '"):
        ids = tokenizer.encode(text)
        tokens = decode_tokens(ids, tokenizer)
        assert len(tokens) == len(ids) and "".join(tokens).strip() == text
        assert all(token.endswith(" ") for token in tokens if token is tokens[-1])
    assert decode_tokens(tokenizer.encode("\U0001faa8"), tokenizer)[0] == ""  # its bytes are four tokens


# ---- with CLIP -----------------------------------------------------------------------------------------------------


def test_clip_guides_by_its_own_view_of_each_image_and_the_lines_say_what_it_cost(runs, folder):
    """Of a size that the captioner's transform does not make."""
    Path("big").mkdir()
    clip, _, big = open_clip.create_model_and_transforms("ViT-Ti-8", force_image_size=48)
    save_file(clip.state_dict(), "big/open_clip_model.safetensors")
    Path("big/open_clip_config.json").write_text(json.dumps({
        "model_cfg": {**open_clip.get_model_config("ViT-Ti-8"), "vision_cfg": {
            **open_clip.get_model_config("ViT-Ti-8")["vision_cfg"], "image_size": 48}}, "preprocess_cfg": {}}))
    command = ("--pretrained", runs / "mdc", *PATHS, "--length", "4", "--clip", "local-dir:big", "--clip-scale", "2")
    assert run(*command, "--batch-size", "3", "--clip-top-k", "3") is None
    model, transform, tokenizer = loaded(runs / "mdc")
    for number, line in enumerate(lines()):
        guide = Guide(Clip(clip.eval(), big, tokenizer), big(scene(number))[None], tokenizer, 2.0, 3)
        alone = model.generate(transform(scene(number))[None], length=4, guide=guide)
        assert line["caption"] == decode_captions(alone, tokenizer)[0] and [line["clip_texts"]] == guide.texts
    assert run(*command, "--batch-size", "2", "--clip-top-k", "1") is None
    assert {line["clip_texts"] for line in lines()} == {0}


def test_captions_of_two_commands_stand_side_by_side_on_the_page(runs, folder):
    command = ("--pretrained", runs / "mdc", *PATHS, "--length", "4")
    run(*command, "--out", "plain.jsonl")
    Path("plain.jsonl").write_text("".join(Path("plain.jsonl").read_text().splitlines(keepends=True)[:-1]))
    clip = ("--clip", f"ViT-Ti-8:{runs / 'clip.pt'}", "--clip-scale", "3", "--clip-rerank", "2", "--temperature", "1")
    assert run(*command, *clip, "--html", "page.html", "--compare", "plain.jsonl") is None
    page = Page(Path("page.html").read_text())
    plain = [line["caption"] for line in lines("plain.jsonl")] + [None]
    shown = [caption for pair in zip([line["caption"] for line in lines()], plain, strict=True) for caption in pair]
    assert page.texts["h2"] == [report.printable(caption) for caption in shown if caption is not None]
    assert sum(attributes.get("class") == "pair" for tag, attributes in page.tags if tag == "article") == 6
    texts = sum(line["clip_texts"] for line in lines()) / 7
    assert page.texts["dd"][-2:] == [
        f"ViT-Ti-8:{runs / 'clip.pt'}, scale 3.0 on 5 tokens a step, the best of 2; {texts:.1f} texts a caption",
        "plain.jsonl"]


# ---- images that are none ----------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_listed_and_all_else_is_captioned(runs, folder):
    whole = encoded(scene(1))
    Path("empty.png").write_bytes(b"")
    Path("text.png").write_text("no image\x1b[2J")
    Path("cut.png").write_bytes(whole[:len(whole) // 2])
    Image.new("RGB", (4, 500)).save("thin.png")
    write_tar(Path("bad.tar"), {"good.png": whole, "broken.png": b"xx", "third.png": whole, "other.png": whole})
    Path("bad.tar").write_bytes(Path("bad.tar").read_bytes()[:3 * len(whole)])
    complaint = run("--pretrained", runs / "mdc", "empty.png", "text.png", "x1.png", "cut.png", "thin.png", "bad.tar",
                    "x2.png", "--length", "3", "--html", "page.html", "--batch-size", "2")
    assert [row["image"] for row in lines()] == ["x1.png", "bad.tar::good", "x2.png"]
    listed = complaint.splitlines()
    assert listed[0] == "error: 6 skipped, all else is written:" and len(listed) == 7
    for line, name in zip(listed[1:], ("empty.png", "text.png", "cut.png", "thin.png", "bad.tar::broken", "bad.tar"),
                          strict=True):
        assert name in line and line.isprintable()
    page = Path("page.html").read_text()
    assert page.count("<article>") == 3 and "not a complete tar" in page
    assert len(re.findall("<li>cannot (?:read|use) the image", page)) == 5


def test_with_no_readable_image_the_files_are_there_and_empty(runs, folder):
    Path("empty.png").write_bytes(b"")
    assert "1 skipped" in run("--pretrained", runs / "mdc", "empty.png")
    assert lines() == []


def test_a_file_name_is_never_a_command(runs, folder):
    shutil.copy("5.tar", "pipe:touch hacked;.tar")
    assert run("--pretrained", runs / "mdc", "pipe*.tar", "--length", "3") is None
    assert lines()[0]["image"] == "pipe:touch hacked;.tar::in/key5" and not Path("hacked").exists()


def test_images_stand_the_way_up_that_the_camera_noted(tmp_path):
    image = Image.new("RGB", (30, 20))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert images.open_image(tmp_path / "turned.jpg").size == (20, 30)


@pytest.mark.parametrize("argv, words", [
    (("nowhere.png",), "nowhere.png"),
    (("x*.gif",), "x*.gif"),
    (("{5..7}.tar",), "7.tar"),
    (("bare",), "no image in bare"),
    (("x1.png", "--out", "nowhere/out.jsonl"), "nowhere/out.jsonl: its folder"),
    (("x1.png", "--length", "900"), "length is 900"),
    (("x1.png", "--text", "a cat"), "no [MASK]"),
    (("x1.png", "--text", "[MASK]", "--length", "3"), "leave out --length"),
    (("x1.png", "--min-length", "3"), "--min-length means nothing to this model"),
    (("x1.png", "--min-length", "5", "--length", "4"), "--min-length 5 is more than --length 4"),
    (("x1.png", "--text", "a [MASK]", "--pretrained", "arc"), "autoregressive"),
    (("x1.png", "--tokens-per-step", "2", "--pretrained", "arc"), "autoregressive"),
    (("x1.png", "--top-p", "0.9"), "top_k and top_p need a temperature"),
    (("x1.png", "--guidance-scale", "2", "--pretrained", "arc"), "autoregressive"),
    (("x1.png", "--guidance-scale", "2"), "the mean of 1 images"),
    (("x1.png", "--guidance-scale", "2", "--guidance-weak", "masked"), "trained with masked image features"),
    (("x1.png", "--guidance-weak", "masked"), "--guidance-weak changes nothing"),
    (("x1.png", "--sampler", "ancestral", "--tokens-per-step", "2"), "--tokens-per-step is of --sampler confidence"),
    (("x1.png", "--steps", "5"), "--steps is of --sampler ancestral"),
    (("x1.png", "--sampler", "ancestral", "--steps", "900"), "steps is 900"),
    (("x1.png", "--sampler", "ancestral", "--pretrained", "arc"), "autoregressive"),
    (("x1.png", "--pretrained", "gone"), "gone"),
    (("x1.png", "--clip-scale", "1"), "needs --clip MODEL:FILE"),
    (("x1.png", "--clip", "ViT-Ti-8:clip.pt"), "changes nothing without --clip-scale or --clip-rerank"),
    (("x1.png", "--clip", "ViT-Ti-8", "--clip-scale", "1"), "should be MODEL:FILE"),
    (("x1.png", "--clip", "ViT-Ti-8:gone.pt", "--clip-scale", "1"), "gone.pt is no file and no tag of ViT-Ti-8"),
    (("x1.png", "--clip", "ViT-Ti-8:clip.pt", "--clip-scale", "1", "--pretrained", "arc"), "autoregressive"),
    (("x1.png", "--clip", "ViT-Ti-8:clip.pt", "--clip-rerank", "3"), "without one all are equal"),
    (("x1.png", "--compare", "x1.png"), "needs --html"),
    (("x1.png", "--compare", "x1.png", "--html", "page.html"), "no file that this tool wrote"),
])
def test_a_mistake_is_one_line_and_leaves_nothing_behind(runs, folder, argv, words):
    Path("bare").mkdir()
    shutil.copytree(runs / "arc", "arc")
    shutil.copy(runs / "clip.pt", "clip.pt")
    before = sorted(os.listdir())
    complaint = run("--pretrained", runs / "mdc", *argv)
    assert words in complaint and complaint.startswith("error: ") and "\n" not in complaint
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(("step", "log_prob"),
                         [(0, None), (None, -1.0), (0, 1e5), (1.5, -1.0), (True, -1.0), (-1, -1.0)])
def test_tokens_to_compare_have_a_step_and_its_log_probability_or_neither(tmp_path, step, log_prob):
    row = {"image": "a.png", "caption": "a", "tokens": [{"token": "a", "step": None, "log_prob": None}]}
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps(row))
    assert read_captions(str(path))["a.png"]["tokens"] == row["tokens"]
    row["tokens"][0] |= {"step": step, "log_prob": log_prob}
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="no file that this tool wrote"):
        read_captions(str(path))


# ---- resuming ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes_with_the_same_options_and_no_others(runs, folder):
    command = ("--pretrained", runs / "mdc", *PATHS, "--length", "4")
    run(*command, "--out", "whole.jsonl")
    whole = Path("whole.jsonl").read_text().splitlines(keepends=True)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 2)
        assert "interrupted" in run(*command, "--batch-size", "2")
    part = Path("captions.jsonl.part")
    head, *kept = part.read_text().splitlines(keepends=True)
    assert [json.loads(line)["image"] for line in kept] == list(NAMES[:4])
    marked = json.dumps({**json.loads(kept[0]), "caption": "kept"}) + "\n"
    left = head + marked + "".join(kept[1:3]) + kept[3][:50]  # killed while it wrote the fourth line

    part.write_text(left)
    run(*command, "--html", "page.html", "--batch-size", "2")
    assert Path("captions.jsonl").read_text().startswith(marked + kept[1] + kept[2]) and not part.exists()
    for got, expected in zip(lines()[3:], map(json.loads, whole[3:]), strict=True):
        assert (got["image"], got["caption"]) == (expected["image"], expected["caption"])
    assert Path("page.html").read_text().count("<article>") == 7

    part.write_text(left)
    run("--pretrained", runs / "mdc", "x1.png", "deep/a.png", "--length", "4")  # other images, in another order
    assert [row["image"] for row in lines()] == ["x1.png", "deep/a.png"]
    assert lines()[1]["caption"] == "kept" and lines()[0]["caption"] == json.loads(whole[2])["caption"]

    for other in (("--length", "5"), ("--precision", "bf16"), ("--tokens-per-step", "2"), ("--temperature", "1"),
                  ("--sampler", "ancestral"), ("--sampler", "ancestral", "--steps", "3")):
        part.write_text(left)
        run(*command, *other)
        assert lines()[0]["caption"] != "kept"


def test_a_resumed_run_knows_a_model_of_the_same_weights_with_another_activation(runs, folder):
    """The weights of ViT-...-quickgelu fit the plain model: they are not what tells captions apart."""
    shutil.copytree(runs / "mdc", "quick")
    Path("quick/params.txt").write_text("model: MDC-ViT-Ti-8\nforce_quick_gelu: True\n")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 1)
        run("--pretrained", runs / "mdc", *PATHS, "--batch-size", "1")
    (kept,) = [json.loads(line) for line in Path("captions.jsonl.part").read_text().splitlines()[1:]]
    run("--pretrained", "quick", *PATHS)
    rows = lines()
    run("--pretrained", "quick", *PATHS, "--out", "alone.jsonl")
    assert rows == lines("alone.jsonl") and rows[0]["tokens"] != kept["tokens"]


def interrupt_after(patch, batches: int) -> None:
    """The model is interrupted, as by Ctrl-C, when it is given one more batch."""
    count, generate = 0, Captioner.generate

    def interrupted(*args, **kwargs):
        nonlocal count
        count += 1
        if count > batches:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    patch.setattr(Captioner, "generate", interrupted)


def test_what_is_captioned_is_not_opened_again(runs, folder):
    command = ("--pretrained", runs / "mdc", *PATHS, "--batch-size", "1", "--workers", "0")
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 6)
        run(*command)
    opened, open_image = [], images.open_image
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "open_image", lambda *args: opened.append(args[1]) or open_image(*args))
        assert run(*command) is None
    assert opened == [NAMES[6]] and [row["image"] for row in lines()] == list(NAMES)


@pytest.mark.parametrize("workers", ["0", "1", "3"])
def test_any_number_of_workers_gives_the_same_lines_in_the_same_order(runs, folder, workers):
    Path("empty.png").write_bytes(b"")
    paths = ("deep", "empty.png", *PATHS[1:])
    complaint = run("--pretrained", runs / "mdc", *paths, "--batch-size", "2", "--workers", workers, "--limit", "7")
    assert "1 skipped" in complaint and [row["image"] for row in lines()] == list(NAMES[:6])


def test_ctrl_c_keeps_what_is_done(runs, folder):
    """The second image is a pipe that nobody writes to: when the first line is there, all there is to do is wait."""
    os.mkfifo("waits.png")
    command = [sys.executable, "-m", "open_clip_mdc", "caption", "--pretrained", str(runs / "mdc"), "x1.png",
               "waits.png", "--length", "3", "--batch-size", "1", "--device", "cpu"]
    # What a shell starts in the background ignores Ctrl-C, and so would what these tests start.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    part = Path("captions.jsonl.part")
    try:
        while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") == 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # a worker waits for the pipe, this process for the worker
        _, complaint = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 1 and "resume when the same command is given again\n" in complaint
    assert "Traceback" not in complaint
    assert [row["image"] for row in lines(part)[1:]] == ["x1.png"]
    os.remove("waits.png")
    scene(1).save("waits.png")
    assert run(*command[4:]) is None
    assert [row["image"] for row in lines()] == ["x1.png", "waits.png"] and not part.exists()


def test_drawn_and_guided_captions_are_those_of_the_seed_and_the_page_says_how(runs, folder):
    command = ("x1.png", "x2.png", "--length", "5", "--html", "page.html", "--pretrained")
    captions = {}
    for alias, options, order, guidance in (
            ("mdc", ("--sampler", "ancestral", "--temperature", "1"), "drawn in 100 steps (ancestral), tokens at "
                                                                       "temperature 1.0", None),
            ("mcs", ("--sampler", "ancestral", "--steps", "4", "--guidance-scale", "3"),
             "drawn in 4 steps (ancestral), tokens at temperature 0.0",
             "scale 3.0, away from the image with masked features"),
            ("cfg", ("--guidance-scale", "3", "--guidance-weak", "blind"), "the most confident first, 1 at a time",
             "scale 3.0, away from no image")):
        assert run(*command, runs / alias, *options) is None
        captions[alias] = lines()
        page = Path("page.html").read_text()
        assert order in page and (guidance in page if guidance else "Guidance" not in page)
        assert run(*command, runs / alias, *options) is None
        assert lines() == captions[alias]
        run(*command, runs / alias, *options, "--seed", "1")
        assert (lines() == captions[alias]) == (alias == "cfg")  # which draws nothing


# ---- the page ------------------------------------------------------------------------------------------------------

HOSTILE = '</h2><script>document.title = "hacked"</script><img src=x onerror="document.title=1"> & \u202egnp.exe\x00'
SHOWN = '</h2><script>document.title = "hacked"</script><img src=x onerror="document.title=1"> & \\u202egnp.exe\\x00'


def row(words: list[tuple], caption=None, image="a.png") -> dict:
    """A line from (token, step, probability)."""
    return {"image": image, "caption": "".join(w for w, *_ in words).strip() if caption is None else caption,
            "tokens": [{"token": w, "step": s, "log_prob": None if p is None else log(p)} for w, s, p in words]}


class Page(HTMLParser):
    """What a browser would make of it, by another reader than the one that is tested there."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.texts, self.cells, self.inside = [], {}, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)
        if tag == "tr":
            self.cells.append([])
        elif tag in ("td", "th"):
            self.cells[-1].append([dict(attributes).get("class", "").split(), ""])

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        last = self.inside[-1] if self.inside else None
        if last in ("td", "th"):
            self.cells[-1][-1][1] += data
        self.texts.setdefault(last, []).append(data)


def write(path, *rows, skipped=()) -> Path:
    thumbnails = [report.thumbnail(scene(i).resize((200, 150)) if i else scene(i)) for i in range(len(rows))]
    cards = [report.card(*pair) for pair in zip(rows, thumbnails, strict=True)]
    report.write_page(path, f"Captions by {HOSTILE}", {"Checkpoint": HOSTILE}, report.legend(), cards, list(skipped))
    return path


EXAMPLE = [("a ", None, None), ("skate", 2, 0.04), ("boarder ", 1, 0.9), ("jumps ", 0, 0.3), ("<end>", 3, 0.996)]


def test_a_grid_shows_what_stood_after_every_step(tmp_path):
    """Hand-drawn; # is hidden, capitals are new."""
    rows = Page(write(tmp_path / "page.html", row(EXAMPLE)).read_text()).cells
    drawn = [[("#" if "mask" in names else text.upper() if "new" in names else text) for names, text in cells]
             for cells in rows]
    assert drawn == [
        ["0", "a", "#", "#", "#", "#"],
        ["1", "a", "#", "#", "JUMPS", "#"],
        ["2", "a", "#", "BOARDER", "jumps", "#"],
        ["3", "a", "SKATE", "boarder", "jumps", "#"],
        ["4", "a", "skate", "boarder", "jumps", "<END>"],
        ["%", "", "4", "90", "30", "100"]]
    colours = [[name for name in names if re.fullmatch(r"p\d|given", name)] for names, _ in rows[4][1:]]
    assert colours == [["given"], ["p0"], ["p5"], ["p2"], ["p5"]]
    joined = [("open" in names, "continued" in names) for names, _ in rows[0][1:]]
    assert joined == [(False, False), (True, False), (False, True), (False, False), (False, False)]


def test_the_grid_is_told_in_words_too(tmp_path):
    tags = Page(write(tmp_path / "page.html", row(EXAMPLE), row([("a ", None, None)])).read_text()).tags
    assert [attributes["aria-label"] for _, attributes in tags if "aria-label" in attributes] == [
        "step 1: jumps, 30 %; step 2: boarder, 90 %; step 3: skate, 4 %; step 4: <end>, 100 %", "nothing was revealed"]


@pytest.mark.parametrize("probability, written, colour", [
    (0.0, "<1", "p0"), (0.004, "<1", "p0"), (0.0999, "10", "p0"), (0.1001, "10", "p1"), (0.2501, "25", "p2"),
    (0.5001, "50", "p3"), (0.7501, "75", "p4"), (0.9001, "90", "p5"), (0.994, "99", "p5"), (1.0, "100", "p5")])
def test_a_probability_has_a_number_and_a_colour(probability, written, colour):
    log_prob = log(probability) if probability else -1e4
    assert report.percent(log_prob) == written
    assert report.word_classes([{"token": "a ", "step": 0, "log_prob": log_prob}]) == [colour]


def test_the_page_is_one_file_without_script_and_shows_hostile_text_as_text(tmp_path):
    page = Page(write(tmp_path / "page.html", row([(HOSTILE, 0, 0.5)], image=HOSTILE), row(EXAMPLE),
                      skipped=[report.printable(HOSTILE)]).read_text())
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "base", "form"})
    assert [attributes["src"][:22] for tag, attributes in page.tags if tag == "img"] == [
        "data:image/png;base64,", "data:image/jpeg;base64"]
    assert {name for _, attributes in page.tags for name in attributes}.isdisjoint(
        {"href", "srcset", "style", "onerror", "onload", "onclick", "action", "background"})
    assert not re.search(r"url\(|@import|expression", "".join(page.texts["style"]))
    shown = SHOWN.strip()
    for tag in ("title", "h1", "h2", "p", "td", "dd", "li"):
        assert any(shown in text for text in page.texts[tag]), tag


def test_colours_of_words_are_readable_in_light_and_dark():
    """Contrast of 4.5 and more, WCAG's, of the text on every colour."""
    def luminance(colour):
        colour = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
        channels = [int(colour[i:i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in report.STYLE.split("@media")[:2])
    text_on = dict(re.findall(r"\.(p\d) {[^}]*--on: var\(--([\w-]+)\)", report.STYLE))
    assert len(text_on) == 6
    for colours in (light, dark):
        for text, ground in [*((colour, name) for name, colour in text_on.items()), ("ink", "page"), ("soft", "page")]:
            bright, dim = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, ground)


# ---- the page in a browser -----------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


def browse(path, *flags) -> str:
    """The document as the browser holds it after the page's scripts, had it any, have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
               f"--user-data-dir={path.parent / 'profile'}", *flags, path.absolute().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@needs_browser
def test_the_browser_shows_every_card_and_runs_and_fetches_nothing(runs, folder):
    asked = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bait = f'<img src="http://127.0.0.1:{server.server_port}/bait.png">'
    Path("bait.html").write_text(bait + "<script>document.title = 'hacked'</script>")
    assert "<title>hacked</title>" in browse(Path("bait.html"), "--dump-dom") and "/bait.png" in asked
    asked.clear()

    shutil.copy("x1.png", "<b>&amp;.png")
    run("--pretrained", runs / "mdc", *PATHS, "<b>&amp;.png", "--html", "page.html")
    seen = Page(browse(Path("page.html"), "--dump-dom"))
    rows = lines()
    assert seen.texts["h2"] == [report.printable(r["caption"]) for r in rows] and len(rows) == 8
    assert seen.texts["p"][-8:] == [*NAMES, "<b>&amp;.png"]
    assert all(attributes["src"].startswith("data:image/") for tag, attributes in seen.tags if tag == "img")

    write(Path("hostile.html"), row([(HOSTILE + bait, 0, 0.5)], image=HOSTILE + bait))
    shown = Page(browse(Path("hostile.html"), "--dump-dom"))
    assert (SHOWN + bait).strip() in "".join(shown.texts["h2"]) and "".join(shown.texts["title"]) != "hacked"
    assert not any(tag in ("script", "b") for tag, _ in seen.tags + shown.tags)
    assert sum(tag == "img" for tag, _ in shown.tags) == 1
    server.shutdown()
    assert not asked


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_never_scrolls_sideways_though_a_grid_may(tmp_path, width):
    words = [(f"word{i} ", i, 0.5) for i in range(30)]
    path = write(tmp_path / "page.html", row(words, caption="unbroken" * 40, image="n" * 300), skipped=["z" * 300])
    measure = "<script>document.title = [document.documentElement.scrollWidth - innerWidth, " \
              "document.querySelector('.steps').scrollWidth - document.querySelector('.steps').clientWidth]</script>"
    path.write_text(re.sub(r"<meta http-equiv[^>]*>", "", path.read_text()) + measure)
    excess = re.search(r"<title>(-?\d+),(-?\d+)</title>", browse(path, "--dump-dom", f"--window-size={width},900"))
    assert int(excess[1]) <= 0 < int(excess[2])


@needs_browser
def test_images_and_colours_are_on_the_screen_in_light_and_dark(tmp_path):
    """Corners are the page's colour, and the colour of a sure word and of the image are somewhere."""
    path = write(tmp_path / "page.html", row(EXAMPLE))
    for name, flags, page, sure in (("light", (), "#fbfaf7", "#1c4e7a"), ("dark", ("--force-dark-mode",), "#16191a",
                                                                       "#9bdcec")):
        shot = tmp_path / f"{name}.png"
        browse(path, f"--screenshot={shot}", "--window-size=900,700", *flags)
        with Image.open(shot) as image:
            colours = {colour for _, colour in image.convert("RGB").getcolors(10 ** 6)}
            corner = image.convert("RGB").getpixel((2, 2))
        assert "#{:02x}{:02x}{:02x}".format(*corner) == page
        assert {tuple(bytes.fromhex(sure[1:])), (0, 255, 90)} <= colours
