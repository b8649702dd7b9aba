"""OpenCLIP 4.x, as far as it differs from 3.3. It trains tasks, which hold model and loss, on dictionaries."""
from collections.abc import Callable
from importlib import import_module

CREATE_LOSS, LOAD, METRICS = (  # functions that have other names in 3.3
    "open_clip_train.main:create_task", "open_clip_train.file_utils:pt_load",
    "open_clip_train.train:zero_shot_eval_all")
LOGGERS, OPTIMIZERS = ("wandb", "tensorboard", "trackio"), ("adamw", "nadamw")
# Flags that name members of samples, with their usual values.
KEY_FLAGS = {"json_text_key": None, "text_key": "txt", "image_key": "jpg;png;jpeg;webp"}
# The stages of webdataset's pipeline that select and decode samples, and which of them stay: captions are tokenized in
# between.
SELECTION, KEPT = ["_select", "_rename", "_select", "_map_dict", "_map_dict", "_map_dict"], (3, 5)
COUNTS_STEPS = True  # True if a checkpoint stores the number of steps
DICT_BATCHES = True  # True if a batch is a dictionary
NAME, OTHER = "4.x", "3.x"


def with_loss(caption_loss: Callable, original: Callable, args, model, **rest):
    """Return the task of a captioner with its loss. `original` makes OpenCLIP's task."""
    task = import_module(".caption_task", __package__).CaptionTask  # there is no `open_clip.task` in 3.3
    return task(model, caption_loss(lambda: original(args, model, **rest).loss))


def run_epoch(around: Callable, original: Callable, state, data, args, **more) -> None:
    """Run an epoch of OpenCLIP inside the context `around`, which gives the model and the schedule of the epoch."""
    task, own = state.task, (state.task.trainable_module, state.scheduler)
    with around(task.trainable_module, data, getattr(task, "loss", None), state.epoch, state.optimizer, state.scheduler,
                args) as (task.trainable_module, state.scheduler):
        original(state, data, args, **more)
    task.trainable_module, state.scheduler = own
