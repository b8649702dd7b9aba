"""OpenCLIP 3.3 alone: a loss beside the model, and the arguments of its epoch (patches.py)."""
from . import image_rates
from .factory import of_captioner
from .hook import hook
from .training import caption_loss, repeatable


@hook
def create_loss(original, args):
    return caption_loss(args, lambda: original(args)) if of_captioner(args) else original(args)


@hook
def train_one_epoch(original, model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None):
    """Wrap `open_clip_train.main.train_one_epoch`: an epoch that is `repeatable`, with the tower's own rates."""
    with repeatable(model, data, loss, epoch, args), image_rates.of_epoch(
            model, optimizer, scheduler, epoch, args) as (model, scheduler):
        original(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=tb_writer)
