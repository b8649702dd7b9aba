"""Claims about training by the real command, on the embedded data set.    pytest tests/core/test_train.py"""
import io
import json
import socket
import tarfile
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from conftest import SHARED, images, needs_data, run
from PIL import Image
from training import TORCHRUN, equal, losses, open_clip_train, train_flags, weights

import open_clip_mdc
from open_clip_mdc import train


@pytest.fixture(scope="session")
def csv(scenes, tmp_path_factory):
    """48 scenes as files and a csv of upstream's format."""
    folder = tmp_path_factory.mktemp("csv")
    rows = []
    with tarfile.open(scenes / "val" / "00000.tar") as tar:
        captions = [m for m in tar.getmembers() if m.name.endswith(".txt")][:48]
        for member in captions:
            image = folder / f"{len(rows)}.png"
            image.write_bytes(tar.extractfile(member.name.removesuffix("txt") + "png").read())
            rows.append({"filepath": str(image), "title": tar.extractfile(member).read().decode()})
    pd.DataFrame(rows).to_csv(folder / "train.csv", sep="\t", index=False)
    return folder / "train.csv"


def test_webdataset_trains_with_falling_loss_validates_and_logs(scenes, tmp_path):
    shards = str(scenes / "train" / "{00000..00007}.tar")
    open_clip_train("--dataset-type", "webdataset", "--val-data", scenes / "val" / "00000.tar", "--batch-size", "16",
                    "--epochs", "2", "--report-to", "tensorboard", "--grad-clip-norm", "1.0", "--train-num-samples",
                    "480", data=shards, logs=tmp_path, workers="1")
    values = losses(tmp_path)
    assert len(values) == 60 and sum(values[-10:]) < 0.8 * sum(values[:10])
    results = [json.loads(x) for x in (tmp_path / "run" / "checkpoints" / "results.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in results] == [1, 2] and results[0]["num_samples"] == 64
    assert results[1]["nelbo_per_token"] < results[0]["nelbo_per_token"]
    assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.parametrize("flags", [
    ("--precision", "amp"),
    ("--precision", "amp_bf16"),
    ("--precision", "bf16"),
    ("--precision", "pure_bf16"),
    ("--accum-freq", "2", "--precision", "fp32"),
    ("--grad-checkpointing", "--lock-image"),
    ("--force-image-size", "48", "--force-context-length", "16"),
], ids=" ".join)
def test_flags_of_upstream_work(csv, tmp_path, flags):
    open_clip_train("--batch-size", "12", "--epochs", "1", *flags, data=csv, logs=tmp_path)
    assert len(losses(tmp_path)) == (2 if "--accum-freq" in flags else 4)
    assert all(torch.isfinite(w).all() for w in weights(tmp_path, 1).values())


@pytest.mark.parametrize("model", ["ARC-ViT-Ti-8", "CapPa-ViT-Ti-8"])
def test_the_other_objectives_train(csv, tmp_path, model):
    open_clip_train("--batch-size", "12", "--epochs", "1", "--val-data", csv, data=csv, logs=tmp_path, model=model)
    assert len(losses(tmp_path)) == 4


def test_synthetic_data_trains(tmp_path):
    open_clip_train("--dataset-type", "synthetic", "--train-num-samples", "16", "--batch-size", "8", "--epochs", "1",
                    logs=tmp_path)
    assert len(losses(tmp_path)) == 2


# One layer each: Inductor's compiler takes a minute as it is.
SHALLOW = """
import sys, open_clip
open_clip.add_model_config(sys.argv.pop(1))
from open_clip_mdc.train import main
main(sys.argv[1:])
"""


def test_compiled_models_train_to_the_same_weights(csv, tmp_path):
    """By the real `main`, with Inductor, on captions whose length changes from batch to batch; up to rounding."""
    config = open_clip_mdc.packaged_configs()["ViT-Ti-8"]
    config["vision_cfg"]["layers"] = config["text_cfg"]["layers"] = 1
    (tmp_path / "ViT-Shallow.json").write_text(json.dumps(config))
    for name, flags in (("start", ["--lr", "0"]), ("eager", []), ("compiled", ["--torchcompile"])):
        open_clip_train("--batch-size", "12", "--epochs", "1", *flags, data=csv, logs=tmp_path, name=name,
                        model="MDC-ViT-Shallow", launcher=("python", "-c", SHALLOW, str(tmp_path / "ViT-Shallow.json")))
    start, eager, compiled = (weights(tmp_path, 1, name) for name in ("start", "eager", "compiled"))
    for key, weight in compiled.items():
        torch.testing.assert_close(weight, eager[key], atol=1e-5, rtol=1e-4)
        assert (weight - start[key]).abs().max() > 1e-4, key


def test_a_clip_model_trains_and_validates_as_before(csv, tmp_path):
    open_clip_train("--batch-size", "8", "--epochs", "1", "--force-image-size", "64", "--val-data", csv, data=csv,
                    logs=tmp_path, model="ViT-S-32-alt")
    result = json.loads((tmp_path / "run" / "checkpoints" / "results.jsonl").read_text())
    assert "clip_val_loss" in result


@pytest.mark.parametrize("model", ["MDC-ViT-Ti-8", "MCD-ViT-Ti-8-mcs"])
def test_a_killed_and_resumed_csv_run_equals_an_unbroken_one_bit_for_bit(csv, tmp_path, model):
    flags = ("--batch-size", "12", "--epochs", "3", "--val-data", csv)
    open_clip_train(*flags, data=csv, logs=tmp_path, model=model, name="unbroken")
    kill_after_epoch_1 = """
import os, sys
import open_clip_mdc.integration.training as hooks
make = hooks.train_one_epoch
def train_one_epoch(upstream):
    train = make(upstream)
    def killed(model, data, loss, epoch, *args, **kwargs):
        if epoch == 1:
            os._exit(9)
        return train(model, data, loss, epoch, *args, **kwargs)
    return killed
hooks.train_one_epoch = train_one_epoch
from open_clip_mdc.train import main
main(sys.argv[1:])
"""
    result = open_clip_train(*flags, data=csv, logs=tmp_path, model=model, name="broken", check=False,
                             launcher=("python", "-c", kill_after_epoch_1))
    assert result.returncode == 9
    open_clip_train(*flags, "--resume", "latest", data=csv, logs=tmp_path, model=model, name="broken")
    unbroken = weights(tmp_path, 3, "unbroken")
    assert equal(unbroken, weights(tmp_path, 3, "broken"))

    path = tmp_path / "unbroken" / "checkpoints" / "epoch_2.pt"
    open_clip_train(*flags, "--resume", path, data=csv, logs=tmp_path, model=model, name="from-path")
    assert equal(unbroken, weights(tmp_path, 3, "from-path"))


# Each rank saves what it holds at the end of an epoch. Inductor is left out: a test above runs it, and it compiles for
# minutes on a busy machine. Runs follow one another in two processes: to start these takes longer than to train.
DUMP = """
import functools, json, sys, torch
import open_clip_mdc.integration.training as hooks
make = hooks.train_one_epoch
def train_one_epoch(upstream):
    train = make(upstream)
    def dumped(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, **kwargs):
        train(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, **kwargs)
        torch.save(hooks.unwrap(model).state_dict(), f"{args.logs}/{args.name}-rank{args.rank}.pt")
    return dumped
hooks.train_one_epoch = train_one_epoch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
from open_clip_mdc.train import main
for argv in json.loads(sys.argv[1]):
    assert not main(argv)
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # the processes have met
"""


@pytest.fixture(scope="module")
def two_processes(scenes, tmp_path_factory):
    """Runs by the real `main` under torchrun: eager, compiled, one with masked features; then the eager one resumed."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "dump.py").write_text(DUMP)
    shards = str(scenes / "train" / "{00000..00007}.tar")
    flags = ("--dataset-type", "webdataset", "--batch-size", "8", "--train-num-samples", "64", "--accum-freq", "2")
    val = ("--val-data", scenes / "val" / "00000.tar")
    runs = [train_flags(*flags, "--epochs", "1", *more, data=shards, logs=folder, name=name, model=model)
            for name, model, more in (
                ("eager", "MDC-ViT-Ti-8", val), ("compiled", "MDC-ViT-Ti-8", (*val, "--torchcompile")),
                ("masked", "MCD-ViT-Ti-8-mcs", ("--batch-size", "2", "--train-num-samples", "32")))]
    run(*TORCHRUN, str(folder / "dump.py"), json.dumps(runs))
    run(*TORCHRUN, "-m", "open_clip_mdc.train", "--", *train_flags(  # as README has it
        *flags, *val, "--epochs", "2", "--resume", "latest", data=shards, logs=folder, name="eager"))
    return folder


def held(folder, name):
    """The weights after the first epoch, which are those of both ranks."""
    first, second = (torch.load(folder / f"{name}-rank{r}.pt", weights_only=True) for r in (0, 1))
    assert equal(first, second)
    return first


def test_two_gloo_processes_hold_equal_weights_and_compiled_ones_train_to_the_same(two_processes):
    eager, compiled = held(two_processes, "eager"), held(two_processes, "compiled")
    for key, weight in eager.items():
        torch.testing.assert_close(compiled[key], weight, atol=1e-5, rtol=1e-4)
    assert equal(eager, weights(two_processes, 1, "eager")) and not equal(eager, weights(two_processes, 2, "eager"))


def test_two_processes_train_alike_when_no_feature_is_masked_and_when_some_are(two_processes):
    """Batches of two images, of which most have no masked feature; with accumulation."""
    weight = held(two_processes, "masked")
    assert len(losses(two_processes, "masked")) == 4
    assert weight["no_patch"].any() and weight["text.time_embedding.weight"].any()


def test_a_failing_validation_never_loses_the_checkpoint(csv, tmp_path):
    broken = tmp_path / "broken.csv"
    broken.write_text("filepath\ttitle\n/does/not/exist.png\ta dog\n")
    open_clip_train("--batch-size", "12", "--epochs", "1", "--val-data", broken, data=csv, logs=tmp_path)
    assert (tmp_path / "run" / "checkpoints" / "epoch_1.pt").exists()
    assert "Validation of epoch 1 failed" in (tmp_path / "run" / "out.log").read_text()
    alone = open_clip_train("--val-data", broken, "--batch-size", "4", logs=tmp_path, name="alone", check=False)
    assert alone.returncode != 0


@pytest.mark.parametrize("flags, word", [
    (("--siglip",), "--siglip"),
    (("--lock-text",), "--lock-text"),
    (("--distill-model", "ViT-B-32", "--distill-pretrained", "openai"), "--distill-model"),
    (("--horovod",), "--horovod"),
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
    (["--train-data", "{csv}", "--device", "gpu"], "--device gpu is not known: cuda"),
    (["--train-data", "{csv}", "--device", "meta"], "--device meta is not known: cuda"),
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
    ("--resume", {"epoch": 1, "optimizer": {}, "state_dict": {"a": torch.zeros(2)}},
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
    open_clip_mdc.register()
    for i in range(29):
        (tmp_path / f"{i:02d}.tar").touch()
    argv = ["--model", "MDC-ViT-Ti-8", "--train-data", f"{tmp_path}/{{00..28}}.tar", "--train-num-samples", "2900"]
    monkeypatch.setenv("WORLD_SIZE", "8")
    problem = train.find_problem(train.parse([*argv, "--workers", "8"]))
    assert "29 shards are too few for 8 workers x 8 processes" in problem and "--workers 3" in problem
    for enough in (["--workers", "3"], ["--workers", "8", "--dataset-resampled"]):
        assert train.find_problem(train.parse([*argv, *enough])) is None


def test_float16_is_warned_of_where_it_is_slow(monkeypatch):
    open_clip_mdc.register()

    def warnings(*flags):
        return list(train.find_warnings(train.parse(["--train-data", "x.csv", *flags])))
    assert "fp32" in warnings("--model", "ViT-B-32")[0]  # on this CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [warning] = warnings("--model", "MDC-ViT-B-32")
    assert "amp_bf16 --torchcompile" in warning
    assert not warnings("--model", "ViT-B-32") and not warnings("--model", "MDC-ViT-B-32", "--precision", "amp_bf16")


def test_flags_that_change_nothing_are_said_to(csv):
    open_clip_mdc.register()

    def warnings(model, *flags):
        argv = ["--model", model, "--train-data", str(csv), "--precision", "fp32", "--device", "cpu", *flags]
        return list(train.find_warnings(train.parse(argv)))
    flags = ("--local-loss", "--gather-with-grad", "--lock-image-freeze-bn-stats", "--use-bn-sync",
             "--train-num-samples")
    found = warnings("MDC-ViT-Ti-8", *flags, "9", "--lock-image-unlocked-groups", "1")
    assert len(found) == 6 and all(f"{flag} has no effect" in " ".join(found) for flag in flags)
    assert not warnings("MDC-ViT-Ti-8") and not warnings("ViT-B-32", "--local-loss", "--gather-with-grad")


# At one of its calls the loss of one process is NaN, or its gradient infinite.
BREAKS = """
import sys, torch
import open_clip_mdc.objectives.loss as objective
from open_clip_mdc.train import main
(what, _, call), calls, forward = sys.argv.pop(1).partition("@"), [], objective.CaptionLoss.forward
def broken(self, *args, **kwargs):
    losses = forward(self, *args, **kwargs)
    calls.append(1)
    bad = len(calls) == int(call)
    if bad and torch.distributed.is_initialized():
        bad = torch.distributed.get_rank() == 1
    if bad:
        scale = torch.tensor(float("nan")) if what == "loss" else overflow.apply(losses["caption_loss"])
        losses["caption_loss"] = losses["caption_loss"] * scale if what == "loss" else scale
    return losses
class overflow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("inf")
objective.CaptionLoss.forward = broken
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("what, flags, said", [
    ("loss@7", (), "the loss is not finite at step 3 of epoch 1: no checkpoint of this epoch is saved"),
    ("loss@7", ("--log-every-n-steps", "100"), "the loss is not finite at step 3 of epoch 1"),
    ("gradient@8", (), "are not finite after the last step of epoch 1"),
])
def test_training_ends_in_one_line_where_the_loss_or_weights_are_not_finite_and_keeps_the_last_good_checkpoint(
        csv, tmp_path, what, flags, said):
    """The loss of the seventh step of four in an epoch; or a gradient of the last, after which no loss is taken."""
    where = dict(data=csv, logs=tmp_path, check=False, launcher=("python", "-c", BREAKS, what))
    ended = open_clip_train("--batch-size", "12", "--epochs", "3", *flags, **where)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("error: ") and said in last and "Traceback" not in ended.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["epoch_1.pt"]
    assert all(x.isfinite().all() for x in weights(tmp_path, 1).values())


def test_both_processes_end_at_the_step_at_which_the_loss_of_one_is_not_finite_and_one_says_so(csv, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])

    def train_as(rank):
        flags = train_flags("--batch-size", "6", "--epochs", "2", "--log-every-n-steps", "2", data=csv, logs=tmp_path)
        return run("python", "-c", BREAKS, "loss@6", *flags, check=False, fork=True, RANK=str(rank),
                   LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(train_as, (0, 1)))
    said = [line for process in ended for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert [process.returncode for process in ended] == [1, 1] and len(said) == 1
    assert said[0] in ended[0].stderr and "the loss is not finite at step 2 of epoch 1" in said[0]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["epoch_1.pt"]


def test_training_goes_on_where_it_shall_or_where_float16s_scaler_leaves_out_a_step(csv, tmp_path):
    for what, flag in (("loss@3", "--allow-nonfinite-loss"), ("gradient@4", "--precision=amp")):
        ended = open_clip_train("--batch-size", "12", "--epochs", "1", flag, data=csv, logs=tmp_path, name=what,
                                launcher=("python", "-c", BREAKS, what))
        assert "TorchDynamo" not in ended.stderr and "compilation metrics" not in ended.stderr
        last = weights(tmp_path, 1, what)
        assert all(x.isfinite().all() for x in last.values()) == (what == "gradient@4")


def test_odd_captions_and_images_train_or_are_logged(tmp_path):
    """Grey, RGBA, palette and truncated images; empty, punctuation, endless and non-ASCII captions."""
    scene = Image.effect_noise((40, 40), 60)
    images = {"grey": scene, **{mode: scene.convert(mode) for mode in ("RGBA", "P", "RGB")}}
    odd = ["", "!!!", "a red circle " * 40, "ein hündchen 犬 🐕"]
    path = tmp_path / "odd.tar"
    with tarfile.open(path, "w") as tar:
        def add(name, data):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for i, (kind, caption) in enumerate(zip(images, odd, strict=True)):
            buffer = io.BytesIO()
            images[kind].save(buffer, "png")
            add(f"{i}.png", buffer.getvalue())
            add(f"{i}.txt", caption.encode())
        add("9.png", buffer.getvalue()[:300])
        add("9.txt", b"a truncated image")
    open_clip_train("--dataset-type", "webdataset", "--batch-size", "4", "--train-num-samples", "8", "--epochs", "1",
                    data=path, logs=tmp_path)
    log = (tmp_path / "run" / "out.log").read_text()
    assert len(losses(tmp_path)) == 2
    assert "Handling webdataset error" in log and "truncated" in log


@needs_data("flickr8k/train/00005.tar")
def test_photographs_train_for_thirty_steps_with_falling_loss(tmp_path):
    shards = str(SHARED / "flickr8k" / "train" / "{00000..00005}.tar")
    config = dict(open_clip_mdc.packaged_configs()["MDC-ViT-Ti-8"])
    assert config["text_cfg"]["vocab_size"] < 1000  # photographs' captions come in pieces of the scenes' vocabulary
    open_clip_train("--dataset-type", "webdataset", "--batch-size", "32", "--train-num-samples", "960", "--epochs", "1",
                    "--force-image-size", "64", data=shards, logs=tmp_path, workers="1")
    values = losses(tmp_path)
    assert len(values) == 30 and sum(values[-5:]) < 0.9 * sum(values[:5])


def test_masks_differ_between_epochs_and_after_a_resume():
    """The hook makes all noise a function of seed, rank and epoch."""
    from types import SimpleNamespace

    from open_clip_train.data import DataInfo

    from open_clip_mdc.integration.data import PrefetchLoader
    from open_clip_mdc.integration.training import train_one_epoch
    open_clip_mdc.register()
    model, _, _ = open_clip_mdc.create_model_and_transforms("MDC-ViT-Ti-8")
    text = open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8")(["a red circle above a blue square"] * 8)
    drawn, data = {}, {"train": DataInfo(PrefetchLoader([(images(8), text)], "cpu", None))}

    def upstream(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None):
        (_, drawn[epoch, args.rank]), = data["train"].dataloader

    for epoch in (0, 1):
        for rank in (0, 1):
            args = SimpleNamespace(model="MDC-ViT-Ti-8", seed=0, rank=rank, torchcompile=False)
            train_one_epoch(upstream)(model, data, None, epoch, None, None, None, None, args)
    weights_of = [c.packed.token for c in drawn.values()]
    assert all((a != b).any() for i, a in enumerate(weights_of) for b in weights_of[:i])
    first = drawn[0, 0].packed.token
    train_one_epoch(upstream)(model, data, None, 0, None, None, None, None,
                              SimpleNamespace(model="MDC-ViT-Ti-8", seed=0, rank=0, torchcompile=False))
    assert torch.equal(drawn[0, 0].packed.token, first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu():
    model, _, _ = open_clip_mdc.create_model_and_transforms("MDC-ViT-Ti-8")
    text = open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8")(["a red circle", "a blue square above a green star"])
    prepared = model.prepare(text)
    cpu = model(images(2), prepared)["token_nll"]
    gpu = model.cuda()(images(2).cuda(), prepared.to("cuda"))["token_nll"]
    torch.testing.assert_close(gpu.cpu(), cpu, atol=1e-4, rtol=1e-4)


