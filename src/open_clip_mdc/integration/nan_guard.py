"""Stop training when the loss or the weights are not finite, before a checkpoint of them is saved."""
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

NEVER = 2**62
WHAT_TO_DO = ("no checkpoint of this epoch is saved, earlier ones are kept. Try a lower --lr, --grad-clip-norm 1 or "
              "--precision amp_bf16")


class WatchedLoss:
    """Loss that raises FloatingPointError after it was not finite, on all ranks at the same step.

    The device records the first such step. The host reads it when OpenCLIP reads the loss for its log, so that no other
    step waits for the device, and in `check` at the end of the epoch. Gradients that overflow are left to float16's
    gradient scaler.
    """

    def __init__(self, loss: Callable[..., dict[str, Tensor]], args):
        self.loss, self.args = loss, args
        self.start(0)

    def start(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.micro_batches = epoch, 0
        self.first_bad = None  # step, int64 []

    def __call__(self, *args, **outputs) -> dict[str, Tensor]:
        losses = self.loss(*args, **outputs)
        self.note(losses)
        return losses

    @torch.compiler.disable
    def note(self, losses: dict[str, Tensor]) -> None:
        """Record on the device whether the loss is finite."""
        step, rest = divmod(self.micro_batches, self.args.accum_freq)
        self.micro_batches += 1
        bad = torch.where(sum(losses.values()).detach().isfinite(), NEVER, step + 1)
        self.first_bad = bad if self.first_bad is None else torch.minimum(self.first_bad, bad)
        if rest == self.args.accum_freq - 1 and step % self.args.log_every_n_steps == 0:
            self.check()

    def check(self) -> None:
        """Raise FloatingPointError on all ranks if a loss of this epoch was not finite on one of them."""
        if self.first_bad is None:
            return
        first = self.first_bad.clone()
        if dist.is_initialized():
            dist.all_reduce(first, dist.ReduceOp.MIN)
        if int(first) != NEVER:
            raise FloatingPointError(f"the loss is not finite at step {int(first)} of epoch {self.epoch}: {WHAT_TO_DO}")


def check_weights(model: nn.Module, epoch: int) -> None:
    """Raise FloatingPointError if a weight that a checkpoint would hold is not finite."""
    weights = {name: x for name, x in model.state_dict().items() if x.is_floating_point()}
    finite = torch.stack([(x.to_local() if hasattr(x, "to_local") else x).isfinite().all()  # FSDP2: this rank's part
                          for x in weights.values()]).int()
    if dist.is_initialized():
        dist.all_reduce(finite, dist.ReduceOp.MIN)
    if bad := [name for name, good in zip(weights, finite.tolist(), strict=True) if not good]:
        raise FloatingPointError(f"{len(bad)} weights ({bad[0]}, ...) are not finite after the last step of epoch "
                                 f"{epoch}: {WHAT_TO_DO}")
