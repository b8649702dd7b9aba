"""Claims about how an image tower trains beside a new decoder.

All runs are by the real command.
"""
import pytest
import torch
from training import checkpoint, equal, open_clip_train_each, tower, train_flags, weights

import open_clip_mdc

SYNTHETIC = "--dataset-type synthetic --train-num-samples 16 --batch-size 4"
CNN = "MDC-small-timm-test_efficientnet"


def decoder(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in state.items() if not name.startswith("visual.")}


@pytest.fixture(scope="module")
def unlocked(tmp_path_factory):
    """Train three epochs with the tower free in the third.

    Others have it locked or free throughout, resume before the unlocking or at it, or combine it with other flags.
    """
    logs = tmp_path_factory.mktemp("unlocked")
    three = (SYNTHETIC, "--epochs 3 --unlock-image-after 2")
    both = (*three, "--image-lr-scale 0.1 --wd 0.5")

    def resumed(flags, name, epoch):
        return train_flags(*flags, "--resume", checkpoint(logs, epoch, name), logs=logs,
                           name=f"{name}-{epoch}")
    open_clip_train_each(
        train_flags(*three, logs=logs, name="after-2"), resumed(three, "after-2", 1), resumed(three, "after-2", 2),
        train_flags(SYNTHETIC, "--epochs 3 --lock-image", logs=logs, name="locked"),
        train_flags(SYNTHETIC, "--epochs 3 --lr 0", logs=logs, name="start"),
        train_flags(*both, logs=logs, name="both"), resumed(both, "both", 1), resumed(both, "both", 2))
    return logs


def test_the_tower_is_locked_first_and_then_free(unlocked):
    """Until it is unlocked all weights equal those of a locked run to the last bit.

    After that the tower's weights move, too.
    """
    first, second, third = (weights(unlocked, epoch, "after-2") for epoch in (1, 2, 3))
    assert equal(tower(weights(unlocked, 1, "start")), tower(second))
    for epoch, state in ((1, first), (2, second)):
        assert equal(state, weights(unlocked, epoch, "locked"))
    moved = [name for name, x in tower(third).items() if not torch.equal(x, second[name])]
    assert len(moved) == len(tower(third)) and not equal(third, weights(unlocked, 3, "locked"))


@pytest.mark.parametrize("name", ["after-2", "both"])
@pytest.mark.parametrize("epoch", [1, 2])
def test_a_run_resumes_bit_for_bit_before_the_unlocking_and_at_it(unlocked, name, epoch):
    assert equal(weights(unlocked, 3, name), weights(unlocked, 3, f"{name}-{epoch}"))


def test_the_optimizer_has_no_state_of_a_locked_tower_and_is_saved_as_openclip_saves_it(unlocked):
    """Two groups have all parameters. Adam counts the steps of a parameter from its first gradient."""
    saved = [torch.load(checkpoint(unlocked, epoch, name), weights_only=True)["optimizer"]
             for name in ("after-2", "both") for epoch in (2, 3)]
    count = len(tower(weights(unlocked, 1, "after-2")))
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in saved]
    assert sizes == sizes[:1] * 4 and len(sizes[0]) == 2
    for locked, free in (saved[:2], saved[2:]):
        assert len(free["state"]) - len(locked["state"]) == count
        assert {int(x["step"]) for x in free["state"].values()} == {4, 12}
    assert all("lr_scale" not in group for group in saved[3]["param_groups"])


@pytest.mark.parametrize("opt", ["adamw", "timm/lookahead_sgd"])
def test_the_towers_learning_rate_is_the_scale_times_the_decoders(tmp_path, opt):
    """Adam's first step, weight decay included, is proportional to the rate, and its gradient is that of both runs."""
    flags = (SYNTHETIC, "--train-num-samples 4 --epochs 1 --warmup 1 --opt", opt)
    open_clip_train_each(*(train_flags(*flags, *more, logs=tmp_path, name=name) for name, more in (
        ("start", ("--lr 0",)), ("plain", ()), ("scaled", ("--image-lr-scale 0.25",)))))
    start, plain, scaled = (weights(tmp_path, 1, name) for name in ("start", "plain", "scaled"))
    assert equal(decoder(plain), decoder(scaled))
    for name, x in tower(scaled).items():
        torch.testing.assert_close(x - start[name], (plain[name] - start[name]) / 4, atol=1e-7, rtol=1e-3)
    assert not equal(tower(plain), tower(start))


def test_a_pretrained_cnn_keeps_its_statistics_in_every_mode_unless_asked_to_learn_them(tmp_path):
    """Each way to give the weights, free and partly locked, captioners and LiT. The weights themselves learn."""
    given = open_clip_mdc.create_model_and_transforms(CNN, force_image_size=64)[0].state_dict()
    for name, x in given.items():
        x.mul_(2) if name.endswith("running_var") else x.add_(0.1) if name.endswith("running_mean") else None
    torch.save(given, tmp_path / "w.pt")
    flags = (SYNTHETIC, "--epochs 1 --force-image-size 64")
    runs = {"whole": ("--pretrained", tmp_path / "w.pt"), "image": ("--pretrained-image", tmp_path / "w.pt"),
            "partly": ("--pretrained", tmp_path / "w.pt", "--lock-image --lock-image-unlocked-groups 2"),
            "learnt": ("--pretrained", tmp_path / "w.pt", "--learn-image-bn-stats"),
            "lit": ("--model LiT-small-timm-test_efficientnet --pretrained-image", tmp_path / "w.pt")}
    open_clip_train_each(*(train_flags(*flags, *more, logs=tmp_path, name=name, model=CNN)
                           for name, more in runs.items()))
    for name in runs:
        after = {key.replace("visual.tower.", "visual."): x for key, x in weights(tmp_path, 1, name).items()}
        kept = {key: torch.equal(after[key], x) for key, x in given.items() if "running_" in key}
        assert kept and set(kept.values()) == {name != "learnt"}, name
        assert any(not torch.equal(after[key], x) for key, x in tower(given).items() if key.endswith("weight")), name
