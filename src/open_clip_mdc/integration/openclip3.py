"""Hooks for OpenCLIP 3.3 only, whose training loop takes model and loss as two arguments (patches.py)."""
from . import image_rates
from .factory import trains_captioner
from .hook import hook
from .training import caption_loss, reproducible


@hook
def create_loss(original, args):
    """Wrap `open_clip_train.main.create_loss`: return `caption_loss` for a captioner."""
    return caption_loss(args, lambda: original(args)) if trains_captioner(args) else original(args)


@hook
def train_one_epoch(original, model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None):
    """Wrap `open_clip_train.main.train_one_epoch`: make it `reproducible`, and apply the image tower's own rates."""
    with reproducible(model, data, loss, epoch, args), image_rates.of_epoch(
            model, optimizer, scheduler, epoch, args) as (model, scheduler):
        original(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=tb_writer)
