"""OpenCLIP 4.x alone: a task, which holds model and loss, and its sharding by FSDP2 (patches.py)."""
from dataclasses import replace

from open_clip.task import ImageTextTask

from . import image_rates
from .factory import of_captioner
from .hook import hook
from .training import caption_loss, repeatable, unwrap


class CaptionTask(ImageTextTask):
    """A captioner and its loss, as OpenCLIP's loop trains them."""

    def __init__(self, model, loss, **kwargs):
        super().__init__(model, **kwargs)
        self.loss = loss

    def training_forward(self, batch):
        """Return the terms of the loss and their sum, and what the log shows."""
        output = self.trainable_module(**batch)
        losses = self.loss(**output, output_dict=True)
        return {**losses, "loss": sum(losses.values())}, self._report(output)

    def eval_forward(self, batch):
        return self.get_trainable_module()(**batch)

    def prepare_fsdp(self, mp_policy=None, **kwargs):
        """Shard as OpenCLIP does, but cast the image alone: 16 bit would round weights and counts of the loss."""
        model = unwrap(self)
        unclipped = [name for name, p in model.named_parameters() if getattr(p, "unclipped", False)]
        if mp_policy is not None:
            mp_policy = replace(mp_policy, cast_forward_inputs=False)
        super().prepare_fsdp(mp_policy=mp_policy, **kwargs)
        for name in unclipped:  # FSDP2 puts parameters of its own in their place
            model.get_parameter(name).unclipped = True
        if mp_policy is not None and mp_policy.param_dtype is not None:
            def cast(_, args, kwargs):
                image = kwargs.pop("image") if "image" in kwargs else args[0]
                return (image.to(mp_policy.param_dtype), *args[1:]), kwargs
            model.register_forward_pre_hook(cast, with_kwargs=True)
        return self


@hook
def create_task(original, args, model, **rest):
    if not of_captioner(args):
        return original(args, model, **rest)
    return CaptionTask(model, caption_loss(args, lambda: original(args, model, **rest).loss))


@hook
def train_one_epoch(original, state, data, args, tb_writer=None):
    """Wrap `open_clip_train.main.train_one_epoch`: an epoch that is `repeatable`, with the tower's own rates."""
    task, own = state.task, (state.task.trainable_module, state.scheduler)
    with repeatable(task, data, getattr(task, "loss", None), state.epoch, args), image_rates.of_epoch(
            task.trainable_module, state.optimizer, state.scheduler, state.epoch, args
    ) as (task.trainable_module, state.scheduler):
        original(state, data, args, tb_writer=tb_writer)
    task.trainable_module, state.scheduler = own
