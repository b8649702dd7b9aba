"""Claims about losses and weights that are not finite."""
import pytest
from training import open_clip_train, run_ranks, train_flags, weights

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
    ("loss@7", "--epochs 3", "the loss is not finite at step 3 of epoch 1: no checkpoint of this epoch is saved"),
    ("loss@7", "--epochs 3 --log-every-n-steps 100", "the loss is not finite at step 3 of epoch 1"),
    ("gradient@8", "--epochs 3", "are not finite after the last step of epoch 1"),
])
def test_training_ends_in_one_line_where_the_loss_or_weights_are_not_finite_and_keeps_the_last_good_checkpoint(
        csv, tmp_path, what, flags, said):
    """An epoch has four steps.

    Either the loss of the seventh step is not finite, or a gradient of the last step of all.
    """
    ended = open_clip_train(flags, data=csv, logs=tmp_path, check=False, launcher=("python", "-c", BREAKS, what))
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1 and last.startswith("error: ") and said in last and "Traceback" not in ended.stderr
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["epoch_1.pt"]
    assert all(x.isfinite().all() for x in weights(tmp_path, 1).values())


def test_both_processes_end_at_the_step_at_which_the_loss_of_one_is_not_finite_and_one_says_so(csv, tmp_path):
    flags = train_flags("--batch-size 6 --epochs 2 --log-every-n-steps 2", data=csv, logs=tmp_path)
    ended = run_ranks("python", "-c", BREAKS, "loss@6", *flags, check=False)
    said = [line for process in ended for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert [process.returncode for process in ended] == [1, 1] and len(said) == 1
    assert said[0] in ended[0].stderr and "the loss is not finite at step 2 of epoch 1" in said[0]
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["epoch_1.pt"]


def test_training_goes_on_where_float16s_scaler_leaves_out_a_step(csv, tmp_path):
    ended = open_clip_train("--precision=amp", data=csv, logs=tmp_path, launcher=("python", "-c", BREAKS, "gradient@4"))
    assert "TorchDynamo" not in ended.stderr and "compilation metrics" not in ended.stderr
    assert all(x.isfinite().all() for x in weights(tmp_path, 1).values())
