"""Claims about flags, data and checkpoints that cannot train.    pytest tests/core/test_train_problems.py"""
import pytest
import torch
from PIL import Image
from training import open_clip_train

import open_clip_mdc
from open_clip_mdc import train
from open_clip_mdc.data.images import encode_png
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.integration import problems
from open_clip_mdc.integration.openclip import MAJOR

PNG = encode_png(Image.new("RGB", (8, 8)))


@pytest.mark.parametrize("flags, word", [
    (("--siglip",), "--siglip"),
    (("--lock-text",), "--lock-text"),
    (("--distill-model", "ViT-B-32", "--distill-pretrained", "openai"), "--distill-model"),
    *([] if MAJOR > 3 else [(("--horovod",), "--horovod")]),  # 4.x has it no more: test_versions.py
    (("--imagenet-val", "/data"), "--imagenet-val"),
])
def test_flags_without_meaning_stop_at_once_with_one_line(csv, capsys, flags, word):
    with pytest.raises(SystemExit) as stop:
        train.main(["--model", "MDC-ViT-Ti-8", "--train-data", str(csv), *flags])
    assert word in stop.value.code and "\n" not in stop.value.code


@pytest.mark.parametrize("flags, words", [
    (["--model", "MDC-ViT-B-23", "--train-data", "{csv}"], "MDC-ViT-B-32"),
    (["--model", "MDC-ViT-L-14-336", "--train-data", "/no/{{00..03}}.tar"], "--train-data: /no/00.tar"),
    (["--val-data", "/no/such.csv"], "--val-data: /no/such.csv"),
    ([], "no data: give --train-data"),
    (["--train-data", "{folder}"], "--train-data: {folder} is a folder"),
    (["--train-data", "{csv}.gz"], "give --dataset-type"),
    (["--train-data", "{empty}"], "line 3"),
    (["--train-data", "{csv}", "--csv-caption-key", "captoin"], "no columns filepath,captoin, only ['filepath',"),
    (["--train-data", "{csv}", "--pretrained", "laion2b"], "--pretrained laion2b is no file"),
    (["--model", "ViT-B-32", "--train-data", "{csv}", "--pretrained", "laion"], "no tag of ViT-B-32: openai"),
    (["--train-data", "{csv}", "--resume", "/no/epoch_1.pt"], "--resume /no/epoch_1.pt"),
    (["--train-data", "{csv}", "--precision", "float"], "argument --precision: invalid choice: 'float'"),
    (["--train-data", "{csv}", "--no-such-flag"], "--no-such-flag is no flag of this command"),
    (["--train-data", "{csv}", "--aug-cfg", "scale"], "error: "),
    (["--train-data", "{csv}", "--opt", "sgd"], "--opt sgd"),
    (["--train-data", "{csv}", "--lr-scheduler", "linear"], "--lr-scheduler linear"),
    (["--train-data", "{csv}", "--lr-scheduler", "const-cooldown"], "--epochs-cooldown"),
    (["--dataset-type", "synthetic"], "--train-num-samples"),
    (["--train-data", "{shards}", "--workers", "3"], "2 shards are too few for 3 workers x 1 processes"),
    (["--train-data", "{shards}", "--workers", "2"], "no sizes.json"),
    (["--train-data", "{shards}", "--workers", "1", "--train-num-samples", "63"], "63 pairs are fewer than one step"),
    (["--train-data", "{csv}"], "48 pairs are fewer than one step takes: --batch-size 64 x 1 processes x --accum-freq"),
    (["--train-data", "{csv}", "--batch-size", "20", "--accum-freq", "3"], "--batch-size 20 x 1 processes x --accum-f"),
    (["--dataset-type", "synthetic", "--train-num-samples", "63"], "63 pairs are fewer than one step takes"),
    *((["--train-data", "{csv}", flag, value], f"{flag} {value} should be ") for flag, values in (
        ("--batch-size", "0"), ("--workers", "-1"), ("--epochs", "0"), ("--accum-freq", "0"), ("--warmup", "-1"),
        ("--log-every-n-steps", "0"), ("--lr", "nan inf -1.0"), ("--wd", "nan"), ("--eps", "-1.0"), ("--seed", "-1"),
        ("--beta2", "1.0"), ("--force-image-size", "0"), ("--force-context-length", "2"), ("--image-std", "0.0"),
        ("--grad-clip-norm", "0.0 nan"), ("--val-frequency", "-1"), ("--force-patch-dropout", "1.0"),
        ("--lock-image-unlocked-groups", "-1")) for value in values.split()),
    (["--train-data", "{csv}", "--device", "gpu"], "--device gpu is not known: give cuda"),
    (["--train-data", "{csv}", "--device", "meta"], "--device meta is not known: give cuda"),
    (["--train-data", "{csv}", "--report-to", "tensorbord"], "--report-to tensorbord is not known"),
    (["--train-data", "{csv}", "--copy-codebase"], "--copy-codebase would copy all of Python's packages"),
    (["--train-data", "{csv}", "--use-bnb-linear", "SwitchBackLinear"], "--use-bnb-linear is not supported"),
])
def test_bad_input_is_named_in_one_line_before_anything_is_built(csv, tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty.csv"
    empty.write_text(f"filepath\ttitle\n{csv.parent / '0.png'}\ta dog\n{csv.parent / '1.png'}\t\n")
    for name in ("0.tar", "1.tar"):
        (tmp_path / name).touch()
    places = dict(csv=csv, folder=csv.parent, empty=empty, shards=tmp_path / "{0..1}.tar")
    with pytest.raises(SystemExit) as stop:
        train.main(["--model", "MDC-ViT-Ti-8", *(flag.format(**places) for flag in flags)])
    line = capsys.readouterr().err.strip() if stop.value.code == 2 else stop.value.code
    assert words.format(**places) in line and line.count("error: ") == 1 and "\n" not in line
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("flag, content, words", [
    ("--pretrained", {"state_dict": {}}, "holds no weights of MDC-ViT-Ti-8: it holds no tensor"),
    ("--pretrained", [1, 2], "holds no weights of MDC-ViT-Ti-8: it holds a list"),
    ("--resume", {"epoch": 1, "optimizer": {}, "state_dict": {"a": torch.zeros(2)},
                  **({"global_step": 1} if MAJOR > 3 else {})},
     "holds no weights of MDC-ViT-Ti-8: it is of an unknown network: its names begin with a, those of a captioner"),
    ("--resume", {"state_dict": {"a": torch.zeros(2)}}, "holds weights, but no epoch and optimizer to resume from"),
])
def test_a_checkpoint_of_something_else_is_named_in_one_line(csv, tmp_path, flag, content, words):
    torch.save(content, tmp_path / "other.pt")
    ended = open_clip_train("--batch-size", "12", "--epochs", "1", flag, tmp_path / "other.pt", data=csv, logs=tmp_path,
                            check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("error: ") and str(tmp_path / "other.pt") in last and words in last
    assert "Traceback" not in ended.stderr


def test_each_process_needs_a_shard_for_each_of_its_workers(tmp_path, monkeypatch):
    open_clip_mdc.register(training=True)
    for i in range(29):
        with tar_writer(tmp_path / f"{i:02d}.tar") as writer:
            writer.write({"__key__": "0", "png": PNG, "txt": "a dog"})
    argv = ["--model", "MDC-ViT-Ti-8", "--train-data", f"{tmp_path}/{{00..28}}.tar", "--train-num-samples", "2900"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = problems.find_problem(train.parse([*argv, "--workers", "8"]))
    assert "29 shards are too few for 8 workers x 8 processes" in found and "--workers 3" in found
    for enough in (["--workers", "3"], ["--workers", "8", "--dataset-resampled"]):
        assert problems.find_problem(train.parse([*argv, *enough])) is None


def test_16_bit_types_are_warned_of_where_they_are_slow(csv, monkeypatch):
    open_clip_mdc.register(training=True)
    monkeypatch.setattr(problems, "emulated", lambda device, dtype: device == "cpu" and dtype == torch.float16)

    def warnings(*flags):
        return list(problems.find_warnings(train.parse(["--train-data", str(csv), "--precision", "amp", *flags])))
    [warning] = warnings("--model", "ViT-B-32")
    assert "slower in float16" in warning and "fp32" in warning
    for fast in ("fp32", "bf16", "amp_bf16"):
        assert not warnings("--model", "ViT-B-32", "--precision", fast)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [warning] = warnings("--model", "MDC-ViT-B-32")
    assert "amp_bf16 --torchcompile" in warning
    assert not warnings("--model", "ViT-B-32") and not warnings("--model", "MDC-ViT-B-32", "--precision", "amp_bf16")


def test_a_warm_up_that_outlasts_the_run_is_said_to(caplog, csv):
    """A run of 6 steps: 5 batches, of which 2 make a step, in 3 epochs."""
    open_clip_mdc.register(training=True)

    def warned(*flags):
        caplog.clear()
        problems.warn_of_warmup(train.parse(["--model", "MDC-ViT-Ti-8", "--train-data", str(csv), "--lr", "1e-3",
                                             "--accum-freq", "2", "--epochs", "3", *flags]), 5)
        return caplog.text
    assert "--warmup 10000 is longer than this run of 6 steps: the learning rate ends at 6e-07" in warned()
    assert warned("--warmup", "7") and not warned("--warmup", "6") and not warned("--skip-scheduler")


def test_flags_that_change_nothing_are_said_to(csv):
    open_clip_mdc.register(training=True)

    def warnings(model, *flags):
        argv = ["--model", model, "--train-data", str(csv), "--precision", "fp32", "--device", "cpu", *flags]
        return list(problems.find_warnings(train.parse(argv)))
    flags = ("--local-loss", "--gather-with-grad", "--lock-image-freeze-bn-stats", "--train-num-samples")
    found = warnings("MDC-ViT-Ti-8", *flags, "9", "--lock-image-unlocked-groups", "1")
    assert len(found) == 5 and all(f"{flag} has no effect" in " ".join(found) for flag in flags)
    assert not warnings("MDC-ViT-Ti-8") and not warnings("ViT-B-32", "--local-loss", "--gather-with-grad")
