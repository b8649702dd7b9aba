"""A captioner as a task of OpenCLIP 4.x, which shards it by FSDP2."""
from dataclasses import replace

from open_clip.task import ImageTextTask

from .training import unwrap


class CaptionTask(ImageTextTask):
    """A captioner and its loss, as OpenCLIP's training loop takes them."""

    def __init__(self, model, loss, **kwargs):
        super().__init__(model, **kwargs)
        self.loss = loss

    def training_forward(self, batch):
        """Return the terms of the loss with their sum, and the values to log."""
        output = self.trainable_module(**batch)
        losses = self.loss(**output, output_dict=True)
        return {**losses, "loss": sum(losses.values())}, self._report(output)

    def eval_forward(self, batch):
        return self.get_trainable_module()(**batch)

    def prepare_fsdp(self, mp_policy=None, **kwargs):
        """Shard as OpenCLIP does, but cast only the image to 16 bit, as that would round the loss's weights."""
        model = unwrap(self)
        unclipped = [name for name, p in model.named_parameters() if getattr(p, "unclipped", False)]
        if mp_policy is not None:
            mp_policy = replace(mp_policy, cast_forward_inputs=False)
        super().prepare_fsdp(mp_policy=mp_policy, **kwargs)
        for name in unclipped:  # FSDP2 has replaced the parameters, and with them the mark
            model.get_parameter(name).unclipped = True
        if mp_policy is not None and mp_policy.param_dtype is not None:
            def cast(_, args, kwargs):
                image = kwargs.pop("image") if "image" in kwargs else args[0]
                return (image.to(mp_policy.param_dtype), *args[1:]), kwargs
            model.register_forward_pre_hook(cast, with_kwargs=True)
        return self
