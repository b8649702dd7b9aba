"""Claims about training by the real command, on the embedded data set."""
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import SHARED, images, json_lines, needs_data, on_gpu, png, run, saved, write_json, write_tar
from open_clip_train.data import DataInfo
from PIL import Image
from torch.testing import assert_close
from training import TORCHRUN, equal, losses, open_clip_train, run_ranks, train_flags, weights

import open_clip_mdc
from open_clip_mdc.integration.prefetch import PrefetchLoader
from open_clip_mdc.integration.training import fuse, reproducible


def test_webdataset_trains_with_falling_loss_validates_and_logs(scenes, tmp_path):
    shards = str(scenes / "train/{00000..00007}.tar")
    open_clip_train("--dataset-type webdataset --batch-size 16 --epochs 2 --report-to tensorboard --grad-clip-norm 1.0 "
                    "--train-num-samples 480 --workers 1 --val-data", scenes / "val/00000.tar", data=shards,
                    logs=tmp_path)
    values = losses(tmp_path)
    assert len(values) == 60 and sum(values[-10:]) < 0.8 * sum(values[:10])
    results = json_lines(tmp_path / "run/checkpoints/results.jsonl")
    assert [r["epoch"] for r in results] == [1, 2] and results[0]["num_samples"] == 64
    assert results[1]["nelbo_per_token"] < results[0]["nelbo_per_token"]
    assert list((tmp_path / "run/tensorboard").iterdir())


@pytest.mark.parametrize("flags", [
    "--precision amp", "--precision amp_bf16", "--precision bf16", "--precision pure_bf16", "--accum-freq 2",
    "--grad-checkpointing --lock-image", "--force-image-size 48 --force-context-length 16",
    "--model ARC-ViT-Ti-8", "--model CapPa-ViT-Ti-8", "--model Mix-ViT-Ti-8-arc25"])
def test_flags_of_upstream_work_and_the_other_objectives_train(csv, tmp_path, flags):
    open_clip_train(flags, "--val-data", csv, data=csv, logs=tmp_path)
    assert len(losses(tmp_path)) == (2 if "--accum-freq" in flags else 4)
    assert all(torch.isfinite(w).all() for w in weights(tmp_path, 1).values())


@pytest.mark.parametrize("model", ["MDC-ViT-Ti-8", "MCD-ViT-Ti-8-mcs", "Mix-ViT-Ti-8-arc50"])
def test_a_killed_and_resumed_csv_run_equals_an_unbroken_one_bit_for_bit(csv, tmp_path, model):
    where = dict(data=csv, logs=tmp_path, model=model)
    flags = ("--epochs 3 --val-data", csv)
    open_clip_train(*flags, **where, name="unbroken")
    kill_after_epoch_1 = """
import os, sys
import open_clip_mdc.integration.training as hooks
seed_noise = hooks.seed_noise
hooks.seed_noise = lambda seed, epoch, rank: os._exit(9) if epoch == 1 else seed_noise(seed, epoch, rank)
from open_clip_mdc.train import main
main(sys.argv[1:])
"""
    assert open_clip_train(*flags, **where, name="broken", check=False, launcher=(
        "python", "-c", kill_after_epoch_1)).returncode == 9
    for name, place in (("broken", "latest"), ("from-path", tmp_path / "unbroken/checkpoints/epoch_2.pt")):
        open_clip_train(*flags, "--resume", place, **where, name=name)
        assert equal(weights(tmp_path, 3, "unbroken"), weights(tmp_path, 3, name))


# Each rank saves what it holds at the end of an epoch. Inductor is left out: a test below runs it, and it compiles for
# minutes on a busy machine. Runs follow one another in two processes: to start these takes longer than to train.
DUMP = """
import atexit, functools, json, os, sys, torch
atexit.register(lambda: torch.distributed.is_initialized() and os._exit(9))  # the last to run: the group must be gone
import open_clip_mdc.integration.training as hooks
check_weights, compile = hooks.check_weights, torch.compile
def dumped(model, epoch):
    check_weights(model, epoch)
    place = f"{argv[argv.index('--logs') + 1]}/{argv[argv.index('--name') + 1]}"
    torch.save(model.state_dict(), f"{place}-rank{torch.distributed.get_rank()}.pt")
hooks.check_weights = dumped
torch.compile = lambda *args, backend=None, **kwargs: compile(*args, backend="aot_eager", **kwargs)
from open_clip_mdc.train import main
for argv in json.loads(sys.argv[1]):
    assert not main(argv)
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # the processes have met
"""


@pytest.fixture(scope="module")
def two_processes(scenes, tmp_path_factory):
    """Run the real `main`: eager, compiled, one with masked features. Then resume the eager one under torchrun."""
    folder = tmp_path_factory.mktemp("two")
    shards = str(scenes / "train/{00000..00007}.tar")
    val = f"--val-data {scenes}/val/00000.tar"

    def flags(name, more):
        return train_flags("--dataset-type webdataset --batch-size 8 --train-num-samples 64 --accum-freq 2", more,
                           data=shards, logs=folder, name=name)
    runs = [*map(flags, ("eager", "compiled", "mix", "masked"), (
        val, f"{val} --torchcompile", "--model Mix-ViT-Ti-8-arc50",
        "--model MCD-ViT-Ti-8-mcs --batch-size 2 --train-num-samples 32 --warmup 5"))]
    (folder / "shown").write_text("".join(rank.stderr for rank in run_ranks("python", "-c", DUMP, json.dumps(runs))))
    run(*TORCHRUN, "-m", "open_clip_mdc.train", "--", *flags("eager", f"{val} --epochs 2 --resume latest"))  # as README
    return folder


def held(folder, name):
    """The weights after the first epoch, which are those of both ranks."""
    first, second = (torch.load(folder / f"{name}-rank{r}.pt", weights_only=True) for r in (0, 1))
    assert equal(first, second)
    return first


def test_two_gloo_processes_hold_equal_weights_and_compiled_ones_train_to_the_same(two_processes):
    eager = held(two_processes, "eager")
    assert_close(held(two_processes, "compiled"), eager, atol=1e-5, rtol=1e-4)
    assert equal(eager, weights(two_processes, 1, "eager")) and not equal(eager, weights(two_processes, 2, "eager"))


def test_two_processes_share_out_the_rows_of_a_mix(two_processes):
    eager, mix = held(two_processes, "eager"), held(two_processes, "mix")
    assert mix["length_head.weight"].any() and eager.keys() == mix.keys() and not equal(eager, mix)


def test_two_processes_train_alike_when_no_feature_is_masked_and_when_some_are(two_processes):
    """Batches have two images, most without masked features, and gradients are accumulated."""
    weight = held(two_processes, "masked")
    assert len(losses(two_processes, "masked")) == 4
    assert weight["no_patch"].any() and weight["text.time_embedding.weight"].any()


def test_one_of_two_processes_warns_of_a_warm_up_that_outlasts_the_run(two_processes):
    """The fourth run has four steps. Every line appears four times, as each run adds a log handler to its process."""
    shown = (two_processes / "shown").read_text()
    given = shown.count("  warmup: 5\n")
    assert shown.count("--warmup 5 is longer than this run of 4 steps") == shown.count("is longer than") == given > 0


def test_a_failing_validation_never_loses_the_checkpoint(csv, tmp_path):
    """The header of the image is whole, so that only reading all of it shows that it is cut off."""
    broken = tmp_path / "broken.csv"
    broken.write_text(f"filepath\ttitle\n{tmp_path}/cut.png\ta dog\n")
    (tmp_path / "cut.png").write_bytes(png(0, 64)[:2000])
    open_clip_train("--val-data", broken, data=csv, logs=tmp_path)
    assert (tmp_path / "run/checkpoints/epoch_1.pt").exists()
    assert "Validation of epoch 1 failed" in (tmp_path / "run/out.log").read_text()
    assert open_clip_train("--val-data", broken, logs=tmp_path, name="alone", check=False).returncode


def test_masks_are_of_the_seed_the_rank_and_the_epoch():
    model, _, _ = open_clip_mdc.create_model_and_transforms("MDC-ViT-Ti-8")
    text = open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8")(["a red circle above a blue square"] * 8)
    data = {"train": DataInfo(PrefetchLoader([(images(8), text)], "cpu", None))}

    def draw(epoch, rank):
        args = SimpleNamespace(model="MDC-ViT-Ti-8", seed=0, rank=rank, torchcompile=False)
        with reproducible(model, data, None, epoch, args):
            (_, noised), = data["train"].dataloader
        return noised.packed.token

    drawn = [draw(epoch, rank) for epoch in (0, 1) for rank in (0, 1)]
    assert len(torch.stack(drawn).unique(dim=0)) == 4 and torch.equal(draw(0, 0), drawn[0])


@on_gpu
def test_cuda_equals_cpu():
    model, _, _ = open_clip_mdc.create_model_and_transforms("MDC-ViT-Ti-8")
    text = open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8")(["a red circle", "a blue square above a green star"])
    prepared = model.prepare(text)
    cpu = model(images(2), prepared)["token_nll"]
    gpu = model.cuda()(images(2).cuda(), prepared.to("cuda"))["token_nll"]
    assert_close(gpu.cpu(), cpu, atol=1e-4, rtol=1e-4)


@needs_data("flickr8k/train/00005.tar")
def test_photographs_train_for_thirty_steps_with_falling_loss(tmp_path):
    shards = str(SHARED / "flickr8k/train/{00000..00005}.tar")
    # photographs' captions come in pieces of the scenes' vocabulary
    assert open_clip_mdc.packaged_configs()["MDC-ViT-Ti-8"]["text_cfg"]["vocab_size"] < 1000
    open_clip_train("--dataset-type webdataset --batch-size 32 --train-num-samples 960 --force-image-size 64 "
                    "--workers 1", data=shards, logs=tmp_path)
    values = losses(tmp_path)
    assert len(values) == 30 and sum(values[-5:]) < 0.9 * sum(values[:5])


def test_odd_captions_and_images_train_or_are_logged(tmp_path):
    """Images are grey, RGBA, palette or truncated. Captions are empty, punctuation, endless or non-ASCII."""
    scene = Image.effect_noise((40, 40), 60)
    content, odd = {}, {"L": "", "RGBA": "!!!", "P": "a red circle " * 40, "RGB": "ein hündchen 犬 🐕"}
    for mode, caption in odd.items():
        content |= {f"{mode}.png": saved(scene.convert(mode)), f"{mode}.txt": caption.encode()}
    content |= {"9.png": content["RGB.png"][:300], "9.txt": b"a truncated image"}
    open_clip_train("--dataset-type webdataset --batch-size 3 --train-num-samples 6",
                    data=write_tar(tmp_path / "odd.tar", content), logs=tmp_path)
    log = (tmp_path / "run/out.log").read_text()
    assert len(losses(tmp_path)) == 2
    assert "Handling webdataset error" in log and "truncated" in log


SHALLOW = """
import sys, open_clip
open_clip.add_model_config(sys.argv.pop(1))
from open_clip_mdc.train import main
main(sys.argv[1:])
"""


def test_compiled_models_train_to_the_same_weights(csv, tmp_path):
    """The real `main` runs with Inductor, on captions of changing lengths. Weights are equal up to rounding."""
    config = open_clip_mdc.packaged_configs()["ViT-Ti-8"]
    config["vision_cfg"]["layers"] = config["text_cfg"]["layers"] = 1
    write_json(tmp_path / "ViT-Shallow.json", config)
    for name, flags in (("start", "--lr 0"), ("eager", "--lr 1e-3"), ("compiled", "--torchcompile")):
        open_clip_train(flags, data=csv, logs=tmp_path, name=name, model="MDC-ViT-Shallow",
                        launcher=("python", "-c", SHALLOW, str(tmp_path / "ViT-Shallow.json")))
    start, eager, compiled = (weights(tmp_path, 1, name) for name in ("start", "eager", "compiled"))
    assert_close(compiled, eager, atol=1e-5, rtol=1e-4)
    for key, weight in compiled.items():
        assert (weight - start[key]).abs().max() > 1e-4, key


def test_a_fused_optimizer_goes_on_where_another_has_begun():
    """It runs on a CPU as well. On a GPU `train_one_epoch` asks for it."""
    torch.manual_seed(0)
    start, gradients = torch.randn(5, 3), torch.randn(6, 5, 3)

    def train(fused_from):
        weights = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([weights], 0.1, weight_decay=0.2)
        for step, gradient in enumerate(gradients):
            if step == fused_from:
                fuse(optimizer)
                assert optimizer.param_groups[0]["fused"]
            weights.grad = gradient.clone()
            optimizer.step()
        return weights.detach()

    for fused_from in (0, 2):  # a new run, and one that was begun by PyTorch's default
        assert_close(train(fused_from), train(None), rtol=1e-6, atol=1e-6)
    plain = torch.optim.SGD([torch.nn.Parameter(start)], 0.1)
    fuse(plain)
    assert not plain.param_groups[0].get("fused")
