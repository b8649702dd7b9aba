"""Claims about --cache-features with --unlock-image-after.

A tower is locked at first and its tokens are read, then it is free and reads images. All runs are by the real command.
"""
import json

import pytest
import torch
from test_feature_cache import seen
from test_train import DUMP
from training import checkpoint, equal, open_clip_train_each, run_ranks, tower, train_flags, weights

STEPS = 8  # of 8 images, in each epoch
LOCKED, EPOCHS = 2, 4
FLAGS = ("--dataset-type webdataset --batch-size 8 --train-num-samples", 8 * STEPS, "--seed 3")
FOUR = (*FLAGS, "--epochs", EPOCHS)


@pytest.fixture(scope="module")
def data(scenes):
    return str(scenes / "train/{00000..00003}.tar")


@pytest.fixture(scope="module")
def logs(data, tmp_path_factory):
    """Run `cached-W` with W data workers, and others on its cache that are locked, resume, or read images only.

    `resumed-W-E` begins after epoch E. `images-W` does so at the unlocking, without the cache.
    """
    folder = tmp_path_factory.mktemp("unlock")

    def flags(name, *more, workers):
        return train_flags(*FOUR, *more, data=data, logs=folder, name=name, workers=workers)
    cache = ("--cache-features", folder / "cache")
    both, images = ("--unlock-image-after", LOCKED, *cache), ("--unlock-image-after", LOCKED)
    runs = []
    for workers in ("0", "1"):
        name = f"cached-{workers}"
        runs += [flags(name, *both, workers=workers), *(
            flags(f"resumed-{workers}-{epoch}", *both, "--resume", checkpoint(folder, epoch, name), workers=workers)
            for epoch in range(1, EPOCHS))]
        runs += [flags(f"images-{workers}", *images, "--resume", checkpoint(folder, LOCKED, name), workers=workers),
                 flags(f"locked-{workers}", "--lock-image", *cache, workers=workers)]
    open_clip_train_each(*runs)
    return folder


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_tower_runs_in_no_locked_epoch_and_once_a_step_in_a_free_one(data, logs, workers, tmp_path):
    both = (*FOUR, "--unlock-image-after", LOCKED, "--cache-features", logs / "cache")
    assert seen(tmp_path, train_flags(*both, data=data, logs=tmp_path, workers=workers)) == (
        [0] * LOCKED * STEPS + [8] * (EPOCHS - LOCKED) * STEPS)


def test_a_run_that_only_locks_the_tower_shares_the_cache_and_one_that_resumes_later_needs_none(data, logs, tmp_path):
    assert len(list((logs / "cache").iterdir())) == 1  # both kinds of runs have used it
    late = (*FOUR, "--unlock-image-after", LOCKED, "--cache-features", tmp_path / "none", "--resume",
            checkpoint(logs, LOCKED, "cached-0"))
    assert seen(tmp_path, train_flags(*late, data=data, logs=tmp_path)) == [8] * (EPOCHS - LOCKED) * STEPS
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("workers", ["0", "1"])
def test_locked_epochs_are_those_of_a_locked_run_and_free_ones_those_of_a_run_on_images(logs, workers):
    """Bit for bit. So are the noise, the order, the captions and the random crops of the free epochs."""
    for epoch in range(1, LOCKED + 1):
        assert equal(weights(logs, epoch, f"cached-{workers}"), weights(logs, epoch, f"locked-{workers}"))
    assert equal(weights(logs, EPOCHS, f"cached-{workers}"), weights(logs, EPOCHS, f"images-{workers}"))
    before, after = (weights(logs, epoch, f"cached-{workers}") for epoch in (LOCKED, LOCKED + 1))
    assert all(not torch.equal(x, after[name]) for name, x in tower(before).items())


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("epoch", range(1, EPOCHS))
def test_a_run_resumes_bit_for_bit_before_the_unlocking_at_it_and_after_it(logs, workers, epoch):
    assert equal(weights(logs, EPOCHS, f"cached-{workers}"), weights(logs, EPOCHS, f"resumed-{workers}-{epoch}"))


def test_two_processes_read_tokens_and_then_images_and_resume(data, tmp_path):
    """DDP, each rank with a worker of its own. Both ranks hold the same weights."""
    both = (*FLAGS, "--epochs 2 --unlock-image-after 1 --cache-features", tmp_path / "cache")
    run_ranks("python", "-c", DUMP, json.dumps([
        train_flags(*both, *more, data=data, logs=tmp_path, name=name, workers="1") for name, more in (
            ("whole", ()), ("resumed", ("--resume", checkpoint(tmp_path, 1, "whole"))),
            ("compiled", ("--torchcompile",)))]))
    torch.testing.assert_close(weights(tmp_path, 2, "compiled"), weights(tmp_path, 2, "whole"), atol=1e-5, rtol=1e-4)
    for name in ("whole", "resumed"):
        ranks = [torch.load(tmp_path / f"{name}-rank{rank}.pt", weights_only=True) for rank in (0, 1)]
        assert equal(*ranks) and equal(ranks[0], weights(tmp_path, 2, "whole"))
    before, after = (tower(weights(tmp_path, epoch, "whole")) for epoch in (1, 2))
    assert all(not torch.equal(x, after[name]) for name, x in before.items())
