"""Claims about OpenCLIP 4.x beside 3.3.    make test OPENCLIP=4 TESTS4=tests/core/test_versions.py"""
import json

import pytest
import torch
from conftest import REPO, json_lines, picture, run, write_csv
from torch.testing import assert_close
from training import MAIN, TORCHRUN, equal, losses, train_flags, weights

from open_clip_mdc import train
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.integration.openclip import MAJOR

RELEASED = REPO / ".venv/bin/python"  # with the registry's version
pytestmark = pytest.mark.skipif(MAJOR < 4, reason="the registry's OpenCLIP is installed: make test OPENCLIP=4")


@pytest.fixture(scope="module")
def csv(tmp_path_factory):
    """48 images of noise with captions of several lengths."""
    folder = tmp_path_factory.mktemp("csv")
    rows = ((folder / picture(folder / f"{i}.png", i), "a red circle" + " above a blue square" * (i % 3))
            for i in range(48))
    return write_csv(folder / "train.csv", [("filepath", "title"), *rows], delimiter="\t")


def flags(csv, logs, name, *more):
    return train_flags("--epochs 2 --lr-scheduler const --val-data", csv, *more, data=csv, logs=logs, name=name)


@pytest.fixture(scope="module")
def logs(csv, tmp_path_factory):
    """Runs `old` by 3.3 and `new` by 4.x."""
    folder = tmp_path_factory.mktemp("logs")
    run(str(RELEASED), "-m", "open_clip_mdc.train", *flags(csv, folder, "old"))
    run(*MAIN, *flags(csv, folder, "new"), fork=True)
    return folder


SPEAKS = """
import json, sys, open_clip_mdc
from importlib import metadata
for run in sys.argv[2:]:
    model = open_clip_mdc.load(run, device="cpu")
    images = [f"{sys.argv[1]}/{i}.png" for i in range(4)]
    print("SAID", json.dumps([metadata.version("open_clip_torch")[0], model.caption(images, length=6), model.score(
        images, ["a red circle", "a blue square above a red circle"]).tolist(), model.features(images).tolist()]))
"""


def test_weights_of_both_versions_give_equal_captions_scores_and_features_in_both(csv, logs):
    said = []
    for python in (str(RELEASED), "python"):
        out = run(python, "-c", SPEAKS, str(csv.parent), str(logs / "old"), str(logs / "new")).stdout
        said.append([json.loads(line[5:]) for line in out.splitlines() if line.startswith("SAID ")])
    for (three, *in3), (four, *in4) in zip(*said, strict=True):
        assert (three, four) == ("3", "4") and in3[0] == in4[0]
        for old, new in zip(in3[1:], in4[1:], strict=True):
            assert_close(torch.tensor(new), torch.tensor(old), atol=1e-4, rtol=0)


def test_the_same_data_noise_and_first_losses_in_both_versions(logs):
    old, new = losses(logs, "old"), losses(logs, "new")
    assert len(old) == len(new) == 8
    assert_close(torch.tensor(new), torch.tensor(old), atol=1e-2, rtol=0)
    rows = [json_lines(logs / name / "checkpoints/results.jsonl") for name in ("old", "new")]
    assert [list(row) for row in rows[0]] == [list(row) for row in rows[1]]


@pytest.mark.parametrize("strategy", ["model", "task", "step"])
def test_every_compile_strategy_trains_to_the_weights_of_the_eager_run(csv, logs, strategy):
    run(*MAIN, *flags(csv, logs, strategy, "--torchcompile --torchcompile-backend aot_eager --epochs 1 "
                      f"--torchcompile-strategy {strategy}"), fork=True)
    assert_close(weights(logs, 1, strategy), weights(logs, 1, "new"), atol=1e-5, rtol=1e-4)


def test_resuming_a_checkpoint_of_the_other_version_is_refused_in_one_line(csv, logs, tmp_path):
    for python, name, other in ((str(RELEASED), "new", "4.x, this is 3.x"), ("python", "old", "3.x, this is 4.x")):
        checkpoint = logs / name / "checkpoints/epoch_1.pt"
        ended = run(python, "-m", "open_clip_mdc.train", *flags(csv, tmp_path, name, "--resume", checkpoint),
                    check=False)
        last = ended.stderr.strip().splitlines()[-1]
        assert ended.returncode == 2 and f"{checkpoint} was trained with OpenCLIP {other}: " in last
        assert "Traceback" not in ended.stderr and not list((tmp_path / name / "checkpoints").iterdir())


WHOLE_AND_HALVES = """
import os
import torch, torch.distributed as dist
from conftest import VOCAB, captions, images, untrained_captioner
from torch.distributed.fsdp import MixedPrecisionPolicy
from open_clip_mdc import register
from open_clip_mdc.integration.caption_task import CaptionTask
from open_clip_mdc.objectives.times import stratified_uniform
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import pack

register(training=True)
dist.init_process_group("gloo")
# As many tokens in each half: the mean of the halves' losses is then that of the whole.
text, image = captions([7] * 8), images(8)

def batch(step, rows):
    noisy = untrained_captioner().corrupt(text, stratified_uniform(8, 0.1 * step), torch.Generator().manual_seed(step))
    noisy = type(noisy)(*(x[rows] if isinstance(x, torch.Tensor) else x for x in noisy))
    return {"image": image[rows], "text": pack(text[rows], noisy, VOCAB)}

def trained(rows, shard):
    task = CaptionTask(untrained_captioner(length_head=True).train(), CaptionLoss(), verbose=False)
    if shard:
        task.prepare_fsdp(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(task.trainable_module.parameters(), lr=1e-3, eps=1e-6)
    for step in range(4):
        optimizer.zero_grad()
        task(batch(step, rows))[0]["loss"].backward()
        torch.nn.utils.clip_grad_norm_(tuple(task.trainable_module.parameters()), 0.1)
        optimizer.step()
    return task.state_dict()["state_dict"]

half = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
alone, halves = trained(slice(8), False), trained(half, True)
start = untrained_captioner(length_head=True).state_dict()
for name, weight in alone.items() if dist.get_rank() == 0 else ():  # which alone has the whole
    torch.testing.assert_close(halves[name], weight, atol=2e-6, rtol=0)
    assert (weight - start[name]).abs().max() > 1e-3, name

task = CaptionTask(untrained_captioner(length_head=True).train(), CaptionLoss(), verbose=False)
task.prepare_fsdp(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
given = batch(1, half)
out = task.trainable_module(**given)
assert torch.equal(out["token_weight"], given["text"].predicted.weight) and out["num_target"].dtype == torch.float32
print("EQUAL", flush=True)
# FSDP keeps gloo's threads alive after destroy_process_group(). At a normal exit they may free their last tensors while
# the interpreter shuts down, which aborts the process (PyTorch's pull request 179291).
os._exit(0)
"""


def test_two_gloo_ranks_of_fsdp_train_to_the_weights_of_one_process(tmp_path):
    """Four steps of AdamW on halves of a batch, clipped without the length head, agree to 2e-6 in float32."""
    (tmp_path / "halves.py").write_text(WHOLE_AND_HALVES)
    assert run(*TORCHRUN, str(tmp_path / "halves.py"), PYTHONPATH=str(REPO / "tests")).stdout.count("EQUAL") == 2


EACH = """
import json, sys, torch
from open_clip_mdc.train import main
for argv in json.loads(sys.argv[1]):
    assert not main(argv)
    torch.distributed.init_process_group = lambda *args, **kwargs: None  # the processes have met
"""


def test_fsdp_trains_validates_and_resumes_as_ddp_by_the_real_command(csv, tmp_path):
    (tmp_path / "each.py").write_text(EACH)
    steps = "--grad-checkpointing --accum-freq 2"
    run(*TORCHRUN, str(tmp_path / "each.py"), json.dumps([flags(csv, tmp_path, *given) for given in (
        ("ddp", steps), ("fsdp", f"--fsdp {steps}"), ("broken", f"--fsdp {steps} --epochs 1"),
        ("broken", f"--fsdp {steps} --resume latest"), ("bf16", "--fsdp --precision amp_bf16 --epochs 1"),
        ("sharded", "--fsdp --fsdp-checkpoint sharded --epochs 1"))]))
    ddp, fsdp = weights(tmp_path, 2, "ddp"), weights(tmp_path, 2, "fsdp")
    assert_close(fsdp, ddp, atol=1e-6, rtol=0)
    assert equal(fsdp, weights(tmp_path, 2, "broken"))
    rows = [json_lines(tmp_path / name / "checkpoints/results.jsonl")[-1] for name in ("ddp", "fsdp")]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    assert all(x.isfinite().all() for x in weights(tmp_path, 1, "bf16").values())
    ended = run(*TORCHRUN, "-m", "open_clip_mdc.train", "--", *flags(
        csv, tmp_path, "later", f"--fsdp --resume {tmp_path}/ddp/checkpoints/epoch_1.pt"), check=False)
    assert ended.returncode and "epoch_1.pt was trained without --fsdp: go on without it" in ended.stderr
    assert "KeyError" not in ended.stderr

    sharded = tmp_path / "sharded/checkpoints/epoch_1"
    with pytest.raises(FileNotFoundError, match=f"{sharded} is a sharded checkpoint: make it one file by ") as error:
        load(str(tmp_path / "sharded"))
    run(*str(error.value).partition("one file by ")[2].split())
    assert load(str(tmp_path / "sharded"))[0].length_head.weight.any()


@pytest.mark.parametrize("flag, word", [
    ("--use-naflex", "--use-naflex"), ("--audio-zeroshot-dataset a/b", "--audio-zeroshot-dataset"),
    ("--horovod", "--horovod is no flag")])
def test_flags_that_have_gone_or_are_not_for_captioners_stop_at_once_with_one_line(csv, capsys, flag, word):
    with pytest.raises(SystemExit):
        train.main(f"--model MDC-ViT-Ti-8 --train-data {csv} {flag}".split())
    line = capsys.readouterr().err.strip()
    assert word in line and "\n" not in line
