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
    *((["--train-data", "{csv}", *flags.split()], words) for flags, words in (
        ("--aug-cfg scale", "--aug-cfg takes NAME=VALUE"), ("--aug-cfg scale=(0.5", "--aug-cfg takes NAME=VALUE"),
        ("--aug-cfg hflip=0.5", "--aug-cfg hflip=0.5 cannot be used ("), ("--aug-cfg scale=0.5", "--aug-cfg scale=0.5"),
        ("--aug-cfg color_jitter_prob=0.5", "--aug-cfg color_jitter_prob=0.5"), ("--opt timm/nope", "--opt timm/nope"),
        ("--opt timm/lamb --lr 1e-3", "give --eps 1e-6"), ("--opt timm/lamb --eps 1e-6", "--opt timm/lamb needs --lr"),
        ("--opt timm/lamb --lr 1 --eps 1e-6 --beta1 0.9", "--beta1 and --beta2"),
        ("--image-mean 0.5 0.5", "--image-mean 0.5 0.5 should be three"), ("--image-std 1 1 1 1", "--image-std 1.0 1"),
        ("--force-image-size 32 32 32", "--force-image-size 32 32 32 should be one number, or height and width"),
        ("--lr-scheduler const-cooldown --epochs-cooldown 5 --epochs 4", "--epochs-cooldown 5 is more than --epochs"))),
    *((["--train-data", "{shards}::{shards}", "--train-data-upsampling-factors", factors, *more], words)
      for factors, more, words in (
        ("2::1", (), "2::1 needs --dataset-resampled"), ("2::x", ("--dataset-resampled",), "2::x should be numbers"),
        ("1::-1", ("--dataset-resampled",), "1::-1 should be 0 or more"),
        ("0::0", ("--dataset-resampled",), "not all 0"),
        ("2", ("--dataset-resampled",), "2 has 1 numbers for 2 sources"), ("nan::1", ("--dataset-resampled",), "nan"))),
    (["--train-data", "{csv}", "--opt", "sgd"], "--opt sgd"),
    (["--train-data", "{csv}", "--lr-scheduler", "linear"], "--lr-scheduler linear"),
    (["--train-data", "{csv}", "--lr-scheduler", "const-cooldown"], "--epochs-cooldown"),
    (["--train-data", "{csv}", "--model", "ViT-B-32", "--trace"], "--trace: a traced model cannot train"),
    (["--train-data", "{csv}", "--model", "ViT-B-32", "--accum-freq", "2", "--distill-model", "ViT-B-16",
      "--distill-pretrained", "openai"], "--accum-freq 1 only"),
    (["--train-data", "{csv}", "--model", "coca_ViT-B-32", "--coca-caption-loss-weight", "nan"], "0 or more and fini"),
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
     "holds no weights of MDC-ViT-Ti-8: it has other names, such as a. "),
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


def test_a_run_without_an_epoch_left_and_16_bit_weights_are_warned_of(csv, tmp_path):
    open_clip_mdc.register(training=True)
    last = tmp_path / "run" / "checkpoints" / "epoch_4.pt"
    last.parent.mkdir(parents=True)
    torch.save({"epoch": 4, "state_dict": {}}, last)

    def warned(*flags):
        argv = ["--model", "MDC-ViT-Ti-8", "--train-data", str(csv), "--precision", "fp32", "--device", "cpu",
                "--logs", str(tmp_path), "--name", "run", *flags]
        return " ".join(problems.find_warnings(train.parse(argv)))
    for which in ("latest", str(last)):
        for epochs in "34":
            assert f"is of epoch 4, so there is nothing to train up to --epochs {epochs}" in warned(
                "--epochs", epochs, "--resume", which)
        assert not warned("--epochs", "5", "--resume", which)
    assert not warned("--epochs", "3") and not warned("--epochs", "3", "--resume", "latest", "--name", "new")
    for kind in ("fp16", "pure_fp16"):
        assert f"--precision {kind} has no gradient scaler" in warned("--precision", kind)


def test_flags_that_change_nothing_are_said_to(csv):
    open_clip_mdc.register(training=True)

    def warnings(model, *flags):
        argv = ["--model", model, "--train-data", str(csv), "--precision", "fp32", "--device", "cpu", *flags]
        return list(problems.find_warnings(train.parse(argv)))
    flags = ("--local-loss", "--gather-with-grad", "--lock-image-freeze-bn-stats", "--train-num-samples")
    found = warnings("MDC-ViT-Ti-8", *flags, "9", "--lock-image-unlocked-groups", "1")
    assert len(found) == 5 and all(f"{flag} has no effect" in " ".join(found) for flag in flags)
    assert not warnings("MDC-ViT-Ti-8") and not warnings("ViT-B-32", "--local-loss", "--gather-with-grad")
