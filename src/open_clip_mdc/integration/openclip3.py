"""OpenCLIP 3.3, as far as it differs from 4.x. Its training loop takes model and loss as two arguments."""
from collections.abc import Callable

CREATE_LOSS, LOAD, METRICS = (  # functions that have other names in 4.x
    "open_clip_train.main:create_loss", "open_clip_train.main:pt_load", "open_clip_train.train:zero_shot_eval")
LOGGERS, OPTIMIZERS = ("wandb", "tensorboard"), ("adamw",)
KEY_FLAGS = {}  # flags that name members of samples, with their usual values
# The stages of webdataset's pipeline that select and decode samples, and which of them stay.
SELECTION, KEPT = ["_select", "_decode", "_rename"], ()
COUNTS_STEPS = False  # True if a checkpoint stores the number of steps
DICT_BATCHES = False  # True if a batch is a dictionary
NAME, OTHER = "3.x", "4.x"


def with_loss(caption_loss: Callable, original: Callable, args):
    """Return the loss of a captioner. `original` makes OpenCLIP's."""
    return caption_loss(lambda: original(args))


def run_epoch(around: Callable, original: Callable, model, data, loss, epoch, optimizer, scaler, schedule, dist_model,
              args, *rest, **more) -> None:
    """Run an epoch of OpenCLIP inside the context `around`, which gives the model and the schedule of the epoch."""
    with around(model, data, loss, epoch, optimizer, schedule, args) as (model, schedule):
        original(model, data, loss, epoch, optimizer, scaler, schedule, dist_model, args, *rest, **more)
