"""Claims about flags, data and checkpoints that cannot train."""
import pytest
import torch
from conftest import png, run, write_tar
from training import open_clip_train, train_flags

from open_clip_mdc import train
from open_clip_mdc.integration import check_flags
from open_clip_mdc.integration.openclip import MAJOR

pytestmark = pytest.mark.usefixtures("registered_for_training")

# A training that gets Ctrl-C once its first checkpoint is there.
CTRL_C = """
import os, signal, threading, time
def stop():
    while not os.path.exists({first!r}):
        time.sleep(.01)
    os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background lacks
threading.Thread(target=stop, daemon=True).start()
from open_clip_mdc.train import main
main({flags!r})
"""


def warnings(csv, flags: str) -> list[str]:
    return list(check_flags.find_warnings(train.parse(
        f"--train-data {csv} --precision fp32 --device cpu --model MDC-ViT-Ti-8 {flags}".split())))


@pytest.mark.parametrize("content, words", [
    ({"epoch": 1, "optimizer": {}, **({"global_step": 1} if MAJOR > 3 else {})},
     "holds no weights of MDC-ViT-Ti-8: it has other names, such as a. "),
    ({}, "holds weights, but no epoch and optimizer to resume from"),
])
def test_a_checkpoint_of_something_else_is_named_in_one_line(csv, tmp_path, content, words):
    torch.save({"state_dict": {"a": torch.zeros(2)}, **content}, tmp_path / "other.pt")
    ended = open_clip_train(f"--resume {tmp_path}/other.pt", data=csv, logs=tmp_path, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 2 and last.startswith("error: ") and f"{tmp_path}/other.pt" in last and words in last
    assert "Traceback" not in ended.stderr


def test_each_process_needs_a_shard_for_each_of_its_workers(tmp_path, monkeypatch):
    for i in range(29):
        write_tar(tmp_path / f"{i:02d}.tar", {"0.png": png(0, 8), "0.txt": b"a dog"})
    monkeypatch.setenv("WORLD_SIZE", "8")
    few, *enough = (check_flags.find_problem(train.parse(
        f"--model MDC-ViT-Ti-8 --train-data {tmp_path}/{{00..28}}.tar --train-num-samples 2900 {flags}".split()
    )) for flags in ("--workers 8", "--workers 3", "--workers 8 --dataset-resampled"))
    assert "29 shards are too few for 8 workers x 8 processes" in few and "--workers 3" in few
    assert enough == [None, None]


def test_16_bit_types_are_warned_of_where_they_are_slow(csv, monkeypatch):
    monkeypatch.setattr(check_flags, "emulated", lambda device, dtype: device == "cpu" and dtype == torch.float16)
    flags = "--device cuda --precision"  # OpenCLIP takes the CPU where there is no GPU
    [warning] = warnings(csv, f"{flags} amp --model ViT-B-32")
    assert "slower in float16" in warning and "fp32" in warning
    for fast in ("fp32", "bf16", "amp_bf16"):
        assert not warnings(csv, f"{flags} {fast} --model ViT-B-32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    [warning] = warnings(csv, f"{flags} amp")
    assert "amp_bf16 --torchcompile" in warning
    assert not warnings(csv, f"{flags} amp --model ViT-B-32") and not warnings(csv, f"{flags} amp_bf16")


def test_a_warm_up_that_outlasts_the_run_is_said_to(caplog, csv):
    """A run of 6 steps: 5 batches, of which 2 make a step, in 3 epochs."""
    def warned(flags):
        caplog.clear()
        check_flags.warn_of_warmup(train.parse(
            f"--model MDC-ViT-Ti-8 --train-data {csv} --lr 1e-3 --accum-freq 2 --epochs 3 {flags}".split()), 5)
        return caplog.text
    assert "--warmup 10000 is longer than this run of 6 steps: the learning rate ends at 6e-07" in warned("")
    assert warned("--warmup 7") and not warned("--warmup 6") and not warned("--skip-scheduler")


def test_a_run_without_an_epoch_left_and_16_bit_weights_are_warned_of(csv, tmp_path):
    last = tmp_path / "run/checkpoints/epoch_4.pt"
    last.parent.mkdir(parents=True)
    torch.save({"epoch": 4, "state_dict": {}}, last)

    def warned(flags):
        return " ".join(warnings(csv, f"--logs {tmp_path} --name run {flags}"))
    for which in ("latest", last):
        for epochs in "34":
            assert f"is of epoch 4, so there is nothing to train up to --epochs {epochs}" in warned(
                f"--epochs {epochs} --resume {which}")
        assert not warned(f"--epochs 5 --resume {which}")
    assert not warned("--epochs 3") and not warned("--epochs 3 --resume latest --name new")
    for kind in ("fp16", "pure_fp16"):
        assert f"--precision {kind} has no gradient scaler" in warned(f"--precision {kind}")


def test_flags_that_change_nothing_are_said_to(csv):
    flags = ("--local-loss --gather-with-grad --lock-image-freeze-bn-stats --epochs-cooldown 2 --train-num-samples 9 "
             "--lock-image-unlocked-groups 1")
    locked = warnings(csv, "--lock-image --force-patch-dropout 0.5")
    assert "--force-patch-dropout has no effect with --lock-image" in locked[0]
    found = warnings(csv, flags)
    assert len(found) == 6 and all(f"{flag} has no effect" in " ".join(found) for flag in flags.split()[:-2]
                                   if flag[0] == "-")
    assert not warnings(csv, "") and not warnings(csv, "--model ViT-B-32 --local-loss --gather-with-grad")



def test_a_run_that_ends_early_does_not_wait_for_its_copies_elsewhere(tmp_path, scenes):
    """OpenCLIP ends the process that copies only after training."""
    ended = open_clip_train(f"--val-data {scenes}/val/00000.tar --dataset-type webdataset --remote-sync {tmp_path}/far "
                            "--remote-sync-protocol fsspec", logs=tmp_path)
    assert "NELBO" in ended.stderr


def test_ctrl_c_says_in_one_line_how_to_resume(csv, tmp_path):
    script = CTRL_C.format(first=f"{tmp_path}/run/checkpoints/epoch_1.pt", flags=train_flags(
        "--epochs 999", data=csv, logs=tmp_path))
    ended = run("python", "-c", script, check=False, fork=True)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert ended.stderr.endswith("\ninterrupted: to resume after its last checkpoint, add --resume latest --name run\n")
