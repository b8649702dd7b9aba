"""Claims about `open_clip_mdc caption` when it is interrupted and run again."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import caption_files
import pytest
from caption_files import NAMES, PATHS, column, lines, run, scene

from open_clip_mdc.data import images
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner

folder = pytest.fixture(caption_files.folder)


def run_interrupted(batches: int, *argv) -> str | None:
    """The complaint of a run whose model is interrupted, as by Ctrl-C, when it is given one more batch."""
    left = [Captioner.generate] * batches

    def generate(*args, **kwargs):
        if not left:
            raise KeyboardInterrupt
        return left.pop()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captioner, "generate", generate)
        return run(*argv)


def test_an_interrupted_run_resumes_with_the_same_options_and_no_others(runs, folder):
    command = ("--pretrained", runs / "mdc", *PATHS, "--length 4")
    run(*command, "--out whole.jsonl")
    whole = lines("whole.jsonl")
    assert "interrupted" in run_interrupted(2, *command, "--batch-size 2")
    part = Path("captions.jsonl.part")
    head, *kept = part.read_text().splitlines(keepends=True)
    assert [json.loads(line)["image"] for line in kept] == list(NAMES[:4])
    marked = json.dumps({**json.loads(kept[0]), "caption": "kept"}) + "\n"
    left = head + marked + "".join(kept[1:3]) + kept[3][:50]  # killed while it wrote the fourth line

    part.write_text(left)
    run(*command, "--html page.html --batch-size 2")
    noted = [json.loads(line) for line in (marked, *kept[1:3])]
    assert lines()[:3] == [{name: row[name] for name in whole[0]} for row in noted] and not part.exists()
    assert column("image") == list(NAMES)
    assert column("caption")[3:] == [row["caption"] for row in whole[3:]]
    assert Path("page.html").read_text().count("<article>") == 7

    part.write_text(left)
    run("--pretrained", runs / "mdc", "x1.png", "deep/a.png", "--length 4")  # other images, in another order
    assert column("image") == ["x1.png", "deep/a.png"] and column("caption") == [whole[2]["caption"], "kept"]

    for other in (("--length 5",), ("--precision bf16",), ("--tokens-per-step 2",), ("--temperature 1",),
                  ("--sampler ancestral",), ("--sampler ancestral --steps 3",)):
        part.write_text(left)
        assert "captions.jsonl.part was begun with another " in run(*command, *other)
        assert part.read_text() == left


def test_guidance_by_a_drawn_mask_resumes_with_the_same_batches_alone(runs, folder):
    command = ("--pretrained", runs / "mcd", *PATHS, "--length 4 --guidance-scale 2 --batch-size")
    run_interrupted(1, *command, "2")
    assert "begun with another batch_size" in run(*command, "3")


@pytest.mark.parametrize("out", ["c.csv", "c.json"])
def test_a_file_of_another_kind_resumes_from_the_same_journal(runs, folder, out):
    for number in range(2):
        scene(number).save(f"{number}.png")
    command = ("--pretrained", runs / "mdc", "0.png", "1.png", "--length 4 --batch-size 1 --out")
    run_interrupted(1, *command, out)
    part = Path(f"{out}.part")
    head, line = part.read_text().splitlines()
    part.write_text(f"{head}\n{json.dumps({**json.loads(line), 'caption': 'kept'})}\n")
    assert run(*command, out) is None and not part.exists()
    assert Path(out).read_text().count("kept") == 1
    assert out != "c.json" or [row["image_id"] for row in json.loads(Path(out).read_text())] == [0, 1]


def test_a_resumed_run_knows_a_model_of_the_same_weights_with_another_activation(runs, folder):
    """The weights of ViT-...-quickgelu fit the plain model: they are not what tells captions apart."""
    shutil.copytree(runs / "mdc", "quick")
    Path("quick/params.txt").write_text("model: MDC-ViT-Ti-8\nforce_quick_gelu: True\n")
    run_interrupted(1, "--pretrained", runs / "mdc", *PATHS, "--batch-size 1")
    _, kept = lines("captions.jsonl.part")
    assert "captions.jsonl.part was begun with another model" in run("--pretrained quick", *PATHS)
    run("--pretrained quick", *PATHS, "--out alone.jsonl")
    assert lines("alone.jsonl")[0]["tokens"] != kept["tokens"]


def test_what_is_captioned_is_not_opened_again(runs, folder):
    command = ("--pretrained", runs / "mdc", *PATHS, "--batch-size 1 --workers 0")
    run_interrupted(6, *command)
    opened, open_image = [], images.open_image
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "open_image", lambda *args: opened.append(args[1]) or open_image(*args))
        assert run(*command) is None
    assert opened == [NAMES[6]] and column("image") == list(NAMES)


@pytest.mark.parametrize("workers", ["0", "1", "3"])
def test_any_number_of_workers_gives_the_same_lines_in_the_same_order(runs, folder, workers):
    Path("empty.png").write_bytes(b"")
    paths = ("deep", "empty.png", *PATHS[1:])
    complaint = run("--pretrained", runs / "mdc", *paths, "--batch-size 2 --workers", workers, "--limit 7")
    assert "1 skipped" in complaint and column("image") == list(NAMES[:6])


def test_ctrl_c_keeps_what_is_done(runs, folder):
    """The second image is a pipe that nobody writes to: when the first line is there, all there is to do is wait."""
    reading, writing = os.pipe()
    os.symlink(f"/dev/fd/{reading}", "waits.png")
    command = [sys.executable, "-m", "open_clip_mdc", "caption", "--pretrained", str(runs / "mdc"), "x1.png",
               "waits.png", "--length", "3", "--batch-size", "1", "--device", "cpu"]
    # What a shell starts in the background ignores Ctrl-C, and so would what these tests start.
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[reading],
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    part = Path("captions.jsonl.part")
    try:
        while process.poll() is None and not (part.exists() and part.read_bytes().count(b"\n") == 2):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)  # a worker waits for the pipe, this process for the worker
        _, complaint = process.communicate()
    finally:
        process.kill()
        os.close(reading)
        os.close(writing)
    assert process.returncode == 1 and "interrupted: run the same command again to resume" in complaint
    assert "Traceback" not in complaint
    assert [row["image"] for row in lines(part)[1:]] == ["x1.png"]
    os.remove("waits.png")
    scene(1).save("waits.png")
    assert run(*command[4:]) is None
    assert column("image") == ["x1.png", "waits.png"] and not part.exists()
