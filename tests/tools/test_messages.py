"""Claims about wrong inputs: one line says what is wrong, where, and what to do.

    pytest tests/tools/test_messages.py
"""
import errno
import io
import json
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import run_tool
from PIL import Image

from clip_benchmark_ext.cli import main as benchmark
from open_clip_mdc import register, train, unregister
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.errors import close_names


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs of MDC and ARC, a CLIP model's, images, shards, captions, and many things that are not what they seem."""
    register()
    folder = tmp_path_factory.mktemp("mistakes")
    for alias, name in (("mdc", "MDC-ViT-Ti-8"), ("arc", "ARC-ViT-Ti-8"), ("clip", "ViT-Ti-8")):
        (folder / alias / "checkpoints").mkdir(parents=True)
        (folder / alias / "params.txt").write_text(f"model: {name}\n")
        torch.save({"state_dict": open_clip.create_model(name).state_dict()},
                   folder / alias / "checkpoints" / "epoch_1.pt")
    (folder / "bare.pt").write_bytes((folder / "mdc" / "checkpoints" / "epoch_1.pt").read_bytes())
    (folder / "empty.pt").write_bytes(b"")
    (folder / "text.pt").write_text("eggs and weights")
    (folder / "cut.pt").write_bytes((folder / "bare.pt").read_bytes()[:5000])
    (folder / "unknown" / "checkpoints").mkdir(parents=True)
    (folder / "unknown" / "params.txt").write_text("model: MDC-ViT-Ti-9\n")
    (folder / "unknown" / "checkpoints" / "epoch_1.pt").write_bytes((folder / "bare.pt").read_bytes())
    (folder / "nameless" / "checkpoints").mkdir(parents=True)
    (folder / "nameless" / "params.txt").write_text("name: x\n")
    torch.save({"state_dict": {}}, folder / "nameless" / "checkpoints" / "epoch_1.pt")
    (folder / "norun" / "checkpoints").mkdir(parents=True)
    (folder / "timm").mkdir()
    (folder / "timm" / "config.json").write_text('{"architecture": "vit_base_patch32_clip_224"}')
    (folder / "images").mkdir()
    for i in range(34):
        Image.new("RGB", (32, 32), (7 * i, 0, 0)).save(folder / "images" / f"{i}.png")
    (folder / "nothing").mkdir()
    (folder / "broken.png").write_bytes(b"no image")
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "png")
    with tar_writer(folder / "0.tar") as writer:
        writer.write({"__key__": "a", "png": buffer.getvalue(), "txt": "a star", "json": "{}"})
    (folder / "cut.tar").write_bytes((folder / "0.tar").read_bytes()[:700])
    (folder / "c.txt").write_text("a star\n")
    (folder / "none.txt").write_text("\n")
    (folder / "a.csv").write_text("filepath,title\nx.png,\n")
    (folder / "b.csv").write_text("file,text\nx.png,a dog\n")
    (folder / "bad.json").write_text("{")
    (folder / "sized").mkdir()
    for name in ("0.tar", "1.tar"):
        (folder / "sized" / name).write_bytes((folder / "0.tar").read_bytes())
    (folder / "sized" / "sizes.json").write_text('{"0.tar": [], "1.tar": -1}')
    for name, token in (("steps", {"token": "a ", "step": "x", "log_prob": -1}), ("probs", {
            "token": "a ", "step": 0, "log_prob": float("nan")})):
        (folder / f"{name}.jsonl").write_text(json.dumps({"image": "a.png", "caption": "a", "tokens": [token]}))
    (folder / "karpathy.json").write_text(json.dumps({"dataset": "flickr8k", "images": []}))
    (folder / "a.json").write_text(json.dumps({"captions": {"0": "a star"}}))
    (folder / "wds" / "test").mkdir(parents=True)
    (folder / "wds" / "test" / "nshards.txt").write_text("1")
    with tar_writer(folder / "wds" / "test" / "0.tar") as writer:
        for i in range(2):
            writer.write({"__key__": str(i), "png": buffer.getvalue(), "txt": "a star"})
    (folder / "wds" / "train").symlink_to(folder / "wds" / "test")
    yield folder
    unregister()


MDC, ARC = ("--pretrained", "mdc"), ("--pretrained", "arc")
CAPTION, SCORE = ("caption", "images", "--out", "c.jsonl"), ("score", "--images", "images", "--captions", "c.txt")
BENCH = ("eval", "--output", "r.json", "--quiet", "--dataset_root", "nothing")
WDS = (*BENCH[:-1], "wds", "--dataset", "wds/x")
CREPE = (*BENCH, "--dataset", "sugar_crepe/swap_obj")

TOOLS = [  # arguments, words of the message
    # names
    (("captoin",), "invalid choice: 'captoin'"),
    ((), "TOOL"),
    ((*CAPTION, *MDC, "--lenght", "8"), "--lenght is no flag of this command: did you mean --length?"),
    ((*CAPTION, *MDC, "--lenght=8"), "--lenght is no flag of this command: did you mean --length?"),
    ((*CAPTION, "--pretraned", "mdc"), "--pretraned is no flag of this command: did you mean --pretrained?"),
    (("prepare", "coco", "--anotations", "x"), "--anotations is no flag of this command: did you mean --annotations?"),
    ((*CAPTION, *MDC, "--workers", "-1"), "--workers: -1 should be at least 0"),
    ((*CAPTION, *MDC, "--batch-size", "many"), "--batch-size: 'many' should be a whole number"),
    ((*SCORE, *MDC, "--alpha", "nan"), "--alpha: nan should be a finite number"),
    (("caption",), "required: PATHS"),
    (("prepare", "cocoo"), "invalid choice: 'cocoo'"),
    (("fetch", "imagenet", "--out", "x"), "invalid choice: 'imagenet'"),
    # the model
    ((*CAPTION, "--pretrained", "nowhere"), "--pretrained: no checkpoint at nowhere: give a file, a run folder"),
    ((*CAPTION, "--pretrained", "bare.pt"), "--pretrained: bare.pt is not in a run folder"),
    ((*CAPTION, "--pretrained", "nameless"), "params.txt names no model: give --model too"),
    ((*CAPTION, "--pretrained", "nameless", "--model", "MDC-ViT-Ti-8"), "holds no weights of MDC-ViT-Ti-8: it holds"),
    ((*CAPTION, "--pretrained", "bare.pt", "--model", "MDC-ViT-Ti-9"),
     "--model MDC-ViT-Ti-9 is not known (did you mean MDC-ViT-Ti-8"),
    ((*CAPTION, "--pretrained", "unknown"), "was trained as MDC-ViT-Ti-9, which is not a known model (did you mean "),
    ((*CAPTION, "--pretrained", "bare.pt", "--model", "MDC-ViT-Ti-16"), "holds no weights of MDC-ViT-Ti-16: "),
    ((*CAPTION, "--pretrained", "bare.pt", "--model", "ARC-ViT-Ti-8"), "ARC-ViT-Ti-8: it has too much length_head"),
    ((*CAPTION, "--pretrained", "bare.pt", "--model", "MDC-timm-crossvit_9_240"), "cannot be made without pooling"),
    ((*CAPTION, "--pretrained", "bare.pt", "--model", "ViT-Ti-8"), "--model ViT-Ti-8 is no captioner"),
    ((*CAPTION, "--pretrained", "clip"), "clip is no captioner"),
    ((*CAPTION, "--pretrained", "empty.pt", "--model", "MDC-ViT-Ti-8"), "empty.pt is no checkpoint: it is empty"),
    ((*CAPTION, "--pretrained", "text.pt", "--model", "MDC-ViT-Ti-8"),
     "text.pt is no checkpoint: it was not written by torch.save"),
    ((*CAPTION, "--pretrained", "cut.pt", "--model", "MDC-ViT-Ti-8"), "cut.pt is damaged or was cut off"),
    ((*CAPTION, "--pretrained", "timm"), "is a folder for timm or transformers"),
    ((*CAPTION, "--pretrained", "nothing"), "has no epoch_*.pt"),
    ((*CAPTION, "--pretrained", "norun/checkpoints"), "has no epoch_*.pt"),
    ((*CAPTION, "--pretrained", "local-dir:nothing"), "nothing"),
    ((*CAPTION, "--pretrained", "hf-hub:nobody/nothing"), "cannot be loaded from the Hugging Face hub"),
    ((*CAPTION, *MDC, "--device", "cuda"), "--device: cuda cannot be used here"),
    ((*CAPTION, *MDC, "--device", "gpu"), "--device: gpu is no device: give cpu, cuda"),
    # caption
    (("caption", "nowhere.jpg", *MDC, "--out", "c.jsonl"), "nowhere.jpg"),
    (("caption", "nothing", *MDC, "--out", "c.jsonl"), "no image in nothing"),
    (("caption", "*.webp", *MDC, "--out", "c.jsonl"), "*.webp"),
    (("caption", "broken.png", *MDC, "--out", "c.jsonl"), "cannot read the image broken.png"),
    (("caption", "images", *MDC, "--out", "c.txt"), "end in .jsonl or .csv or .parquet or .json, or be a folder"),
    (("caption", "broken.png", *MDC, "--out", "c.json"), "broken.png has no image_id for COCO's results format"),
    (("caption", "images", *MDC, "--out", "no/c.jsonl"), "--out no/c.jsonl: its folder does not exist"),
    ((*CAPTION, *MDC, "--html", "no/c.html"), "--html no/c.html: its folder does not exist"),
    ((*CAPTION, *MDC, "--length", "0"), "--length: 0 should be at least 1"),
    ((*CAPTION, *MDC, "--length", "long"), "argument --length: "),
    ((*CAPTION, *MDC, "--length", "900"), "--length 900 is more than this model's context holds: give 1 to 75 tokens"),
    ((*CAPTION, *ARC, "--length", "sample"), "length is 'sample': it must be 'auto' or a number"),
    ((*CAPTION, *MDC, "--text", "a dog"), "has no [MASK]"),
    ((*CAPTION, *MDC, "--text", "[MASK]", "--length", "3"), "leave out --length"),
    ((*CAPTION, *MDC, "--text", "[MASK] " * 90), "has 92 tokens with SOT and EOT, but the model reads at most 77"),
    ((*CAPTION, *ARC, "--text", "a [MASK]"), "is not supported by this model, which is autoregressive"),
    ((*CAPTION, *ARC, "--tokens-per-step", "2"), "is not supported by this model, which is autoregressive"),
    *(((*CAPTION, *MDC, "--tokens-per-step", value), f"--tokens-per-step: {value} should be a number of tokens")
      for value in ("2.0", "1.5", "0")),
    ((*CAPTION, *ARC, "--guidance-scale", "2"), "is not supported by this model, which is autoregressive"),
    ((*CAPTION, *MDC, "--min-length", "2"), "--min-length is not supported by this model, which decodes by"),
    ((*CAPTION, *MDC, "--top-k", "5"), "need a temperature"),
    ((*CAPTION, *MDC, "--temperature", "-1"), "temperature is -1.0"),
    ((*CAPTION, *MDC, "--temperature", "1", "--top-p", "2"), "top_p is 2.0"),
    ((*CAPTION, *MDC, "--batch-size", "0"), "--batch-size: 0 should be at least 1"),
    ((*CAPTION, *MDC, "--guidance-scale", "2", "--blind-images", "nowhere"), "--blind-images: no image or folder"),
    ((*CAPTION, *MDC, "--guidance-scale", "2", "--blind-images", "broken.png"), "cannot read the image broken.png"),
    (("caption", "images/1.png", "--out", "c.jsonl", *MDC, "--guidance-scale", "2"), "or more by --blind-images"),
    (("caption", "images/1.png", *MDC, "--out", "tables"), "is neither a shard (.tar) nor a folder of images"),
    (("caption", "cut.tar", *MDC, "--out", "tables"), "cut.tar: not a complete tar file"),
    (("caption", "0.tar", *MDC, "--out", "tables", "--length", "900"),
     "--length 900 is more than this model's context holds"),
    (("attention", "images", *MDC, "--length", "76"), "--length 76 is more than this model's context holds"),
    ((*CAPTION, *ARC, "--min-length", "76"), "--min-length 76 is more than this model's context holds"),
    ((*CAPTION, *MDC, "--html", "c.html", "--compare", "steps.jsonl"), "--compare steps.jsonl is not a .jsonl file of"),
    ((*CAPTION, *MDC, "--html", "c.html", "--compare", "probs.jsonl"), "0 and nan are not a step and its log-prob"),
    (("attention", "images", *MDC, "--text", "", "--out", "x.html"), "--text is a caption with a [MASK]"),
    ((*CAPTION, *MDC, "--text", ""), "has no [MASK] to fill in"),
    # score, embed
    ((*SCORE, *MDC, "--captions", "nowhere.txt"), "--captions: nowhere.txt: no such file or directory"),
    ((*SCORE, *MDC, "--captions", "nothing"), "--captions: nothing: is a directory"),
    ((*SCORE, *MDC, "--captions", "none.txt"), "none.txt has no caption"),
    ((*SCORE, *MDC, "--images", "nowhere"), "--images: no image or folder nowhere"),
    ((*SCORE, *MDC, "--out", "s.txt"), "should end in .csv or .jsonl"),
    ((*SCORE, *MDC, "--blind-images", "images/1.png"), "the mean of 1 image still shows them"),
    ((*SCORE, *MDC, "--plain", "--alpha", "0.5"), "--plain leaves out the blind and the debiased score"),
    ((*SCORE, *MDC, "--out", "s.csv", "--jobs", "2"), "--jobs are for tables of shards"),
    (("score", *MDC, "--pairs", "nowhere.csv", "--out", "tables"), "--pairs: nowhere.csv: no such file or directory"),
    (("score", *MDC, "--pairs", "b.csv", "--out", "tables"), "has no column"),
    (("score", *MDC, "--pairs", "0.tar", "--out", "tables", "--top", "30"), "--top: 30 should be more than 0"),
    (("embed", "0.tar", *MDC, "--out", "tables", "--feature", "max"), "invalid choice: 'max'"),
    (("embed", "0.tar", *MDC, "--out", "tables", "--layer", "99"), "layer is 99; this image tower has layers 0 to"),
    (("embed", "0.tar", *MDC, "--out", "tables", "--jobs", "0"), "--jobs: 0 should be at least 1"),
    # the others
    (("prepare", "coco", "--images", "images", "--annotations", "nowhere.json", "--out", "x"),
     "--annotations: nowhere.json: no such file or directory"),
    (("prepare", "coco", "--images", "images", "--annotations", "bad.json", "--out", "x"), "is not Karpathy's"),
    (("prepare", "coco", "--images", "images", "--annotations", "karpathy.json", "--out", "x"), "is for 'flickr8k'"),
    (("prepare", "shards", "--out", "x"), "at least one of --train"),
    (("prepare", "shards", "--train", "nowhere.tar", "--out", "x"), "--train: nowhere.tar: no such shard"),
    (("prepare", "shards", "--train", "0.tar", "--out", "images"), "remove it or choose another --out"),
    (("prepare", "recap", "--shards", "9.tar", "--pairs", "5", "--out", "x"), "--shards: 9.tar: no such shard"),
    (("lengths", "nowhere.tar"), "nowhere.tar: no such shard"),
    (("lengths", "0.tar", "--names", "a", "b"), "--names has 2 names for 1 data sets"),
    (("lengths", "0.tar", "--tokenizer", "ViT-B-33"), "--tokenizer ViT-B-33: no model"),
    (("reconstruct", *MDC, "--data", "nowhere.tar"), "--data: nowhere.tar: no such shard"),
    (("schedule-search", "--model", "MDC-ViT-Ti-9", "--train-data", "0.tar"),
     "--model MDC-ViT-Ti-9 is no captioner known here (did you mean MDC-ViT-Ti-8"),
    (("schedule-search", *MDC, "--train-data", "nowhere.tar"), "--train-data: nowhere.tar: no such shard"),
    (("schedule-search", *ARC, "--train-data", "0.tar"), "has no interval of t"),
    (("judge", "--captions", "a=a.json", "--images", "images", "--url", "http://x/v1"), "--model"),
    (("judge", "--captions", "a=none.json", "b=a.json", "--images", "images", "--url", "http://x/v1", "--model", "m"),
     "none.json"),
    (("export", *MDC, "--out", "images"), "is not an empty folder: remove it or choose another --out"),
    (("export", *MDC, "--out", "x", "--push", "name"), "--push name should be ORG/NAME"),
    (("scenes", "--out", "images"), "is not an empty folder: remove it or choose another --out"),
]

TRAIN = [
    ((), "no data: give --train-data"),
    (("--train-data", "images"), "--train-data: images is a folder"),
    (("--train-data", "c.txt"), "ends in neither .tar, .csv nor .tsv"),
    (("--train-data", "9.tar"), "--train-data: 9.tar: no such shard"),
    (("--train-data", "0.tar", "--workers", "4"), "1 shards are too few for 4 workers"),
    (("--train-data", "0.tar", "--workers", "1"), "give --train-num-samples"),
    (("--train-data", "a.csv", "--csv-separator", ","), "1 rows without caption"),
    (("--train-data", "b.csv"), "has no column"),
    (("--train-data", "nowhere.csv"), "--train-data: nowhere.csv: no such file"),
    (("--train-data", "sized/0.tar", "--workers", "1"), "is damaged (int() argument must be"),
    (("--train-data", "sized/1.tar", "--workers", "1"), "says how many pairs there are: give --train-num-samples"),
    (("--model", "MDC-ViT-B-23"), "--model MDC-ViT-B-23 is not known (did you mean MDC-ViT-B-32"),
    (("--model", "ViT-B-32", "--pretrained", "laion4b"), "--pretrained laion4b is no file, and no tag of ViT-B-32"),
    (("--model", "MDC-ViT-Ti-8", "--pretrained", "nowhere.pt"), "--pretrained nowhere.pt is no file"),
    (("--model", "MDC-ViT-Ti-8", "--resume", "nowhere.pt"), "--resume nowhere.pt is no file"),
    (("--model", "MDC-ViT-Ti-8", "--siglip"), "--siglip is not supported for the captioner"),
    (("--opt", "sgd"), "--opt sgd is not known"),
    (("--batch-sise", "3"), "--batch-sise is no flag of this command: did you mean --batch-size?"),
    (("--precision", "float"), "argument --precision: invalid choice: 'float'"),
    (("--epochs", "many"), "argument --epochs: invalid int value: 'many'"),
]

BENCHMARK = [
    (BENCH, "--model is missing: mdc, arc or another captioner with --pretrained RUN"),
    ((*BENCH, "--pretrained", "mdc"), "--model is missing"),
    ((*CREPE, "--model", "mdc", *MDC, "--batch_size", "0"), "--batch_size 0 should be at least 1"),
    ((*CREPE, "--model", "mdc", *MDC, "--num_workers", "-1"), "--num_workers -1 should be at least 0"),
    ((*CREPE, "--model", "mdc", *MDC, "--samples", "0"), "--samples: 0 should be at least 1"),
    ((*CREPE, "--model", "mdc", *MDC, "--workers", "1"), "--workers is no flag of this command: did you mean --num_wo"),
    ((*CREPE, "--model", "mdc", *MDC, "--lenght", "1"), "did you mean --caption_length or --min_length?"),
    ((*CREPE, "--model", "mdc", *MDC, "--task", "probing"), "argument --task: invalid choice: 'probing'"),
    ((*CREPE, "--model", "mdc"), "--model mdc needs --pretrained"),
    ((*CREPE, "--model", "MDC-ViT-Ti-8"), "--model MDC-ViT-Ti-8 needs --pretrained"),
    ((*CREPE, "--model", "mdc", "--pretrained", "nowhere"), "--pretrained: no checkpoint at nowhere"),
    ((*CREPE, "--model", "mdc", "--pretrained", "arc"), "is a checkpoint of ARC-ViT-Ti-8, not MDC"),
    ((*CREPE, "--model", "mdc", "--pretrained", "clip"), "is a checkpoint of ViT-Ti-8, which is no captioner"),
    ((*CREPE, "--model", "ViT-B-33", "--pretrained", "x"), "is no model known here (did you mean ViT-B-32"),
    ((*CREPE, "--model", "mdc", *MDC), "swap_obj.json"),
    ((*CREPE, "--model", "mdc", *MDC, "--task", "captioning"), "give --task image_caption_selection"),
    ((*CREPE, "--model", "mdc", *MDC, "--scorer", "autoregressive"), "--scorer autoregressive does not fit"),
    ((*CREPE, "--model", "mdc", *MDC, "--trained_interval"), "is an option of --scorer monte_carlo"),
    ((*BENCH, "--dataset", "sugar_crepes", "--model", "mdc", *MDC), "unknown data set 'sugar_crepes' (did you mean "),
    ((*BENCH, "--dataset", "aro/vg", "--model", "mdc", *MDC), "unknown data set 'aro/vg'"),
    ((*BENCH, "--dataset", "wds/none", "--model", "mdc", *MDC, "--task", "linear_probe"), "no webdataset in nothing"),
    ((*BENCH, "--dataset", "cifar11", "--model", "mdc", *MDC, "--task", "linear_probe"), "cifar11"),
    ((*WDS, "--model", "mdc", *MDC, "--task", "linear_probe"), "is not fit for linear_probe: Classes not specified"),
    ((*WDS, "--model", "mdc", *MDC, "--task", "zeroshot_classification"), "is not fit for zeroshot_classification"),
    ((*WDS, "--model", "mdc", *MDC, "--task", "zeroshot_retrieval", "--shortlist", "5"), "go together"),
    ((*WDS, "--model", "mdc", *MDC, "--task", "captioning", "--caption_length", "76"),
     "--caption_length 76 is more than this model's context holds: give 1 to 75 tokens"),
    ((*WDS, "--model", "arc", *ARC, "--task", "captioning", "--tokens_per_step", "2"),
     "--tokens_per_step is not supported by this model"),
    ((*WDS, "--model", "mdc", *MDC, "--task", "captioning", "--tokens_per_step", "2.0"),
     "--tokens_per_step: 2.0 should be a number of tokens"),
]


def said(main, argv, capsys) -> str:
    """Return the last line of a command that ends by itself."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(arg) for arg in argv])
    if isinstance(end.value.code, str):
        return end.value.code
    assert end.value.code == 2
    return capsys.readouterr().err.strip()


def check(main, argv, words, place, monkeypatch, capsys) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    line = said(main, argv, capsys)
    assert words in line, line
    assert "error: " in line and "Traceback" not in line and "[Errno" not in line and len(line) < 700, line
    first, *rest = line.splitlines()
    assert all(row.startswith("  ") for row in rest), line  # a list, announced by the first line
    left = {path for path in set(place.rglob("*")) - set(before) if path.name not in (
        "c.jsonl", "tables", ".claims", "pairs", "x") and path.suffix != ".pyc"}
    assert not left, left


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test may wait for a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for variable in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("argv, words", TOOLS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_mistake_with_a_tool_is_one_line(place, monkeypatch, capsys, argv, words):
    needs_device = "--pretrained" in argv and "--device" not in argv and argv[0] != "export"
    check(run_tool, (*argv, "--device", "cpu") if needs_device else argv, words, place, monkeypatch, capsys)


@pytest.mark.parametrize("argv, words", TRAIN, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_mistake_in_training_is_one_line_before_anything_is_built(place, monkeypatch, capsys, argv, words):
    monkeypatch.setattr(open_clip, "create_model_and_transforms", lambda *args, **kwargs: pytest.fail("a model"))
    check(train.main, argv, words, place, monkeypatch, capsys)


@pytest.mark.parametrize("argv, words", BENCHMARK, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_a_mistake_with_the_benchmark_is_one_line(place, monkeypatch, capsys, argv, words):
    monkeypatch.setattr("sys.argv", ["clip_benchmark"])
    check(benchmark, argv, words, place, monkeypatch, capsys)


def test_close_names_are_the_closest_and_none_is_forced():
    assert close_names("MDC-ViT-B-23", ["MDC-ViT-B-32", "RN50"]) == " (did you mean MDC-ViT-B-32?)"
    assert close_names("zzz", ["MDC-ViT-B-32"]) == ""


def test_a_default_is_to_blame_for_nothing():
    from argparse import Namespace

    from open_clip_mdc.errors import complaint
    problem, args = ValueError("no local folder"), Namespace(tool="caption", engine="local")
    assert complaint(problem, args, ["caption"]) == "no local folder"
    assert complaint(problem, args, ["caption", "--engine=local"]) == "--engine: no local folder"


def test_a_full_disk_is_blamed_on_the_target(tmp_path):
    from argparse import Namespace

    from open_clip_mdc.errors import complaint
    full = OSError(errno.ENOSPC, "No space left on device")
    assert complaint(full, Namespace(out="a.jsonl"), []) == "--out: a.jsonl: no space left on device"
    assert complaint(full, Namespace(logs="logs", out=None), []) == "--logs: logs: no space left on device"
    assert complaint(full, Namespace(), []) == "a file: no space left on device"
