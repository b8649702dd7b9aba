"""What stands in for upstream's functions while `register()` is in force (the table is in integration.py).

Each hook takes the upstream object and returns its replacement, which does something only for captioners, except that
what reads the training data, seeds the random numbers, reads or writes checkpoints and mends upstream's defects does so
for every model.
"""
import argparse
import json
import logging
import os
import random
import re
import tarfile
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from pathlib import Path

import numpy as np
import open_clip
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torchvision.transforms import Compose
from webdataset.handlers import reraise_exception

from . import configs, weights
from .checkpoints import latest_checkpoint
from .data.files import new_file
from .data.images import upright
from .data.shards import Bounded, as_file, check_size
from .finite import WatchedLoss, check_weights
from .integration import is_captioner
from .loading import Batches, CsvImages, need_batches, read_alike, seed_noise, seed_webdataset, split_normalization
from .model import Captioner
from .objective import CaptionLoss
from .tokens import CAPTION_SEPARATOR
from .validation import nelbo


def get_model_config(upstream):
    """`open_clip.get_model_config`: captioners of any base; a config that is a file may name no other place."""
    @wraps(upstream)
    def get(model_name):
        if ":" in model_name:
            return checked_config(upstream, model_name)
        config = upstream(model_name)
        return config if config is not None else configs.captioner(model_name, upstream)
    return get


def checked_config(read, model_name: str) -> dict:
    """The config of a local-dir: or hf-hub:.

    Raises:
        ValueError: it is damaged, or would have something else fetched than the user named. OSError: it is not there.
    """
    where = f"{model_name.partition(':')[2]}/open_clip_config.json"
    try:
        config = read(model_name)
        towers = {**config["vision_cfg"], **config["text_cfg"], **config["text_cfg"].get("tokenizer_kwargs", {})}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"{where} is no config of a model ({type(problem).__name__}: {problem})") from problem
    for name, value in towers.items():
        text_tower = name == "hf_model_name" and "caption_cfg" not in config and model_name.startswith("local-dir:")
        if isinstance(value, str) and (":" in value or text_tower and not Path(value).is_dir()):
            raise ValueError(f"{where}: {name} is {value[:80]!r}, which lies elsewhere: nothing is fetched that you "
                             "did not name")
    return config


def vocabulary_beside(model_name: str, cache_dir: str | None = None) -> dict[str, str]:
    """The `bpe_path` of a captioner of local-dir: or hf-hub: whose vocabulary lies beside its weights; else nothing."""
    try:
        config = open_clip.get_model_config(model_name)
        name = Path(config["text_cfg"].get("tokenizer_kwargs", {}).get("bpe_path", "")).name
        if "caption_cfg" not in config or not name:
            return {}
        source, _, place = model_name.partition(":")
        path = Path(place) / name if source == "local-dir" else Path(hf_hub_download(place, name, cache_dir=cache_dir))
    except (FileNotFoundError, EntryNotFoundError):  # no captioner, or a packaged vocabulary
        return {}
    return {"bpe_path": str(path)} if path.is_file() else {}


def get_tokenizer(upstream):
    """`open_clip.get_tokenizer`: a captioner's is CLIP's BPE, or the part of it that its config names."""
    @wraps(upstream)
    def get(model_name="", context_length=None, cache_dir=None, **kwargs):
        if ":" in model_name:
            kwargs = vocabulary_beside(model_name, cache_dir) | kwargs
        if ":" in model_name or not is_captioner(model_name):
            return upstream(model_name, context_length=context_length, cache_dir=cache_dir, **kwargs)
        text_cfg = open_clip.get_model_config(model_name)["text_cfg"]
        return open_clip.factory.SimpleTokenizer(context_length=context_length or text_cfg.get("context_length", 77),
                                                 **text_cfg.get("tokenizer_kwargs", {}) | kwargs)
    return get


def model_class(upstream):
    """`open_clip.factory.CustomTextCLIP`: a config with `caption_cfg` makes a Captioner."""
    @wraps(upstream, updated=())
    def create(*args, **kwargs):
        return (Captioner if "caption_cfg" in kwargs else upstream)(*args, **kwargs)
    return create


def tokenizer_class(upstream):
    """`open_clip.factory.SimpleTokenizer`: a bare file name in `bpe_path` is looked up among the packaged configs."""
    @wraps(upstream, updated=())
    def create(*args, bpe_path=None, **kwargs):
        if bpe_path is None:
            return upstream(*args, **kwargs)
        packaged = configs.FOLDER / Path(bpe_path).name
        return upstream(*args, bpe_path=bpe_path if Path(bpe_path).exists() else str(packaged), **kwargs)
    return create


def parse_args(upstream):
    """`open_clip_train.main.parse_args`: the flags of upstream and those that it does not have."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    own.add_argument("--allow-nonfinite-loss", action="store_true",
                     help="Train on, and save, when a captioner's loss or weights are not finite.")

    @wraps(upstream)
    def parse(argv):
        flags, rest = own.parse_known_args(argv)
        try:
            args = upstream(rest)
        except SystemExit as end:
            if not end.code:
                own.print_help()
            raise
        vars(args).update({name: True for name, given in vars(flags).items() if given})  # params.txt is as upstream's
        return args
    return parse


def setup_logging(upstream):
    """`open_clip_train.main.setup_logging`: PyTorch's own loggers say what they say by default."""
    @wraps(upstream)
    def setup(*args, **kwargs):
        levels = {name: logging.getLogger(name).level for name in ["torch", *logging.root.manager.loggerDict]
                  if name.partition(".")[0] == "torch"}
        upstream(*args, **kwargs)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    return setup


def of_captioner(args) -> bool:
    """Whether a captioner is trained; who calls upstream's functions may give them no model's name."""
    return is_captioner(getattr(args, "model", ""))


def create_loss(upstream):
    """`open_clip_train.main.create_loss`."""
    @wraps(upstream)
    def create(args):
        return CaptionLoss() if of_captioner(args) else upstream(args)
    return create


def get_wds_dataset(upstream):
    """`open_clip_train.data.get_wds_dataset`, for every model: repeatable by --seed, pinned, one caption of several,
    images as all else reads them.

    Of the captions that share a KEY.txt training draws one at each reading, validation takes the first. An ordinary
    text draws nothing.
    """
    @wraps(upstream)
    def get_dataset(args, preprocess_img, is_train, epoch=0, floor=False, tokenizer=None):
        def tokenize(text: str):
            captions = text.split(CAPTION_SEPARATOR)
            return tokenizer(random.choice(captions) if is_train and len(captions) > 1 else captions[0])
        info = upstream(args, preprocess_img, is_train, epoch=epoch, floor=floor, tokenizer=tokenize)
        read_alike(info)
        info.dataloader.pipeline[0].pin_memory = str(getattr(args, "device", "cpu")).startswith("cuda")
        if is_train:
            seed_webdataset(info, getattr(args, "seed", 0), getattr(args, "rank", 0))
            need_batches(info, args.train_data)
        return info
    return get_dataset


def gopen(upstream):
    """`webdataset.gopen.gopen`: what is a file is opened as a file, whatever its name."""
    @wraps(upstream)
    def open_shard(url, mode="rb", *args, **kwargs):
        return upstream(as_file(url) if mode == "rb" else url, mode, *args, **kwargs)
    return open_shard


def tar_file_iterator(upstream):
    """`webdataset.tariterators.tar_file_iterator`, for every reader of shards: `check_size` before a member is read."""
    @wraps(upstream)
    def iterate(fileobj, skip_meta=r"__[^/]*__($|/)", handler=reraise_exception, select_files=None, rename_files=None):
        archive = tarfile.open(fileobj=fileobj, mode="r|*", tarinfo=Bounded)
        for member in archive:
            name = member.name
            try:
                if not member.isreg() or skip_meta is not None and re.match(skip_meta, name):
                    continue
                name = rename_files(name) if rename_files else name
                if select_files is None or select_files(name):
                    check_size(member)
                    yield {"fname": name, "data": archive.extractfile(member).read()}
                    archive.members = []
            except Exception as problem:
                problem.args = (f"{problem} @ {fileobj}",)
                if not handler(problem):
                    break
    return iterate


def csv_dataset(upstream):
    """`open_clip_train.data.CsvDataset`."""
    return CsvImages


def load_state_dict(upstream):
    """`open_clip.factory.load_state_dict`."""
    @wraps(upstream)
    def load(checkpoint_path, device="cpu", weights_only=True):
        return {name: x.to(device) for name, x in weights.tensors(Path(checkpoint_path)).items()}
    return load


def load_checkpoint(upstream):
    """`open_clip.load_checkpoint`, for every model: formats by content; raises Misfit for weights of another model."""
    @wraps(upstream)
    def load(model, checkpoint_path, *args, **kwargs):
        path = Path(checkpoint_path)
        archive = weights.check(path) == "npz"
        if archive != (path.suffix in (".npz", ".npy")):  # by which upstream goes
            raise ValueError(f"{path} is {'a' if archive else 'no'} NumPy archive: rename it to end in "
                             f"{'.npz' if archive else '.pt or .safetensors'}")
        try:
            keys = upstream(model, path, *args, **kwargs)
        except weights.Misfit:
            raise
        except (RuntimeError, KeyError, AttributeError, TypeError, IndexError, AssertionError) as problem:
            raise (weights.Misfit("it is an .npz of big_vision, of a SigLIP model") if archive else
                   weights.misfit(model.state_dict(), weights.tensors(path))) from problem
        if archive:
            weights.check_finite(model.state_dict(), path)
        return keys
    return load


def pt_load(upstream):
    """`open_clip_train.main.pt_load`: the names of weights are the bare model's, whichever processes saved them.

    Raises:
        ValueError: the file is damaged, or nothing can resume from it.
    """
    @wraps(upstream)
    def load(file_path, map_location=None):
        path = Path(file_path)
        content = weights.read(path) if path.exists() else weights.unpickled(
            lambda: upstream(file_path, map_location=map_location), file_path)
        weights.check_finite(content, path)
        bare = weights.state_dict(content, path)
        if isinstance(content.get("epoch"), int) and {"state_dict", "optimizer"} <= content.keys():
            return {**content, "state_dict": bare}
        if "epoch" in content or "state_dict" in content:
            raise ValueError(f"{file_path} holds weights, but no epoch and optimizer to resume from: give it by "
                             "--pretrained")
        return bare
    return load


def get_latest_checkpoint(upstream):
    """`open_clip_train.main.get_latest_checkpoint`: of a folder here, as the tools choose."""
    @wraps(upstream)
    def get(path, remote):
        if remote or not any(Path(path).glob("epoch_*.pt")):
            return upstream(path, remote)
        return str(latest_checkpoint(Path(path)))
    return get


def save(upstream):
    """`torch.save`: a file appears under its name when it is complete, or not at all.

    Raises:
        OSError: it cannot be written; PyTorch's own error does not say why.
    """
    @wraps(upstream)
    def save_whole(obj, f, *args, **kwargs):
        if not isinstance(f, (str, os.PathLike)):
            return upstream(obj, f, *args, **kwargs)
        with new_file(f) as partial:
            try:
                with partial.open("wb") as file:
                    upstream(obj, file, *args, **kwargs)
            except (RuntimeError, OSError) as problem:
                cause = problem if isinstance(problem, OSError) else problem.__context__
                if not isinstance(cause, OSError):
                    raise
                raise OSError(cause.errno, cause.strerror, str(f)) from problem
    return save_whole


def no_program(upstream):
    """`PIL.EpsImagePlugin.gs_binary`: there is no Ghostscript."""
    return False


def get_data(upstream):
    """`open_clip_train.main.get_data`, for every model: training images reach the device as bytes, one batch ahead."""
    @wraps(upstream)
    def get(args, preprocess_fns, epoch=0, tokenizer=None):
        train, validate = preprocess_fns
        train, normalize = split_normalization(train)
        validate = Compose([upright, validate])  # of --imagenet-val, whose images torchvision opens
        data = upstream(args, (train, validate), epoch=epoch, tokenizer=tokenizer)
        if "train" in data:
            device = getattr(args, "device", "cpu")
            data["train"].dataloader = Batches(data["train"].dataloader, device, normalize)
        return data
    return get


def unwrap(model):
    """The model inside torch.compile and DDP."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "module", model)


def train_one_epoch(upstream):
    """`open_clip_train.main.train_one_epoch`, for every model: all noise is a function of --seed, rank and epoch.

    A captioner's texts are prepared before they go to the device, once for both passes of --accum-freq. A resumed run
    then repeats what the uninterrupted one would have done: order, augmentation, masks and t.

    Raises:
        FloatingPointError: a captioner's loss or weights are not finite; on all ranks. Upstream saves after an epoch.
    """
    @wraps(upstream)
    def train(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=None):
        captioner, seed = of_captioner(args), getattr(args, "seed", 0)
        if captioner:
            unwrap(model).seed_t(np.random.SeedSequence([seed, epoch]))
            data["train"].dataloader.prepare = unwrap(model).prepare
        seed_noise(seed, epoch, getattr(args, "rank", 0))
        watched = captioner and not getattr(args, "allow_nonfinite_loss", False)
        if watched:
            loss = WatchedLoss(loss, epoch, args)
        # Captions change in length. Where DDP splits a compiled graph, each part is compiled for several of them; older
        # PyTorch fails at it.
        whole_graphs = captioner and getattr(args, "torchcompile", False)
        with torch._dynamo.config.patch(optimize_ddp=False) if whole_graphs else nullcontext():
            upstream(model, data, loss, epoch, optimizer, scaler, scheduler, dist_model, args, tb_writer=tb_writer)
        if watched:
            loss.check()
            check_weights(unwrap(model), epoch)
    return train


def forget_from(epoch: int, path: Path) -> None:
    """Drops the rows of this epoch and later ones, which a run that was killed before it saved has left.

    A line that broke off, and what follows it, cannot be had again: it says so. A row that names no epoch, as upstream
    writes it of zero-shot classification alone, stays.
    """
    if not path.exists():
        return
    kept = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            if json.loads(line).get("epoch", 0) >= epoch:
                break
        except (ValueError, AttributeError, TypeError):
            logging.warning("%s: line %d broke off: it and all after it are dropped", path, number)
            break
        kept.append(f"{line}\n")
    with new_file(path) as partial:
        partial.write_text("".join(kept), encoding="utf-8")


def evaluate(upstream):
    """`open_clip_train.main.evaluate`: captioners are validated by `validation_metrics`, logged by upstream."""
    @wraps(upstream)
    def evaluate_captioner(model, data, epoch, args, tb_writer=None, tokenizer=None):
        if getattr(args, "save_logs", False) and getattr(args, "train_data", None):
            forget_from(epoch, Path(args.checkpoint_path) / "results.jsonl")
        if not of_captioner(args):
            return upstream(model, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer)
        # Upstream's contrastive validation runs where it finds "val".
        data = {"captions" if name == "val" else name: info for name, info in data.items()}
        try:
            return upstream(model, data, epoch, args, tb_writer=tb_writer, tokenizer=tokenizer)
        except Exception:
            if "train" not in data:
                raise
            logging.exception(f"Validation of epoch {epoch} failed; the checkpoint is saved and training continues.")
            return {}
    return evaluate_captioner


def validation_metrics(upstream):
    """`open_clip_train.train.zero_shot_eval`, which upstream logs first: the NELBO of the validation captions.

    Of every model with the epoch, by which `forget_from` knows a row.
    """
    @wraps(upstream)
    def metrics_of_captions(model, data, epoch, args, tokenizer=None):
        if not of_captioner(args):
            metrics = upstream(model, data, epoch, args, tokenizer=tokenizer)
            return {**metrics, "epoch": epoch} if metrics else metrics
        due = args.val_frequency and (epoch % args.val_frequency == 0 or epoch == args.epochs)
        if "captions" not in data or not due:
            return {}
        metrics = nelbo(unwrap(model), data["captions"].dataloader, args.device, args.precision)
        return {**metrics, "epoch": epoch}
    return metrics_of_captions


def count_hits(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """For each k, at most C, the number of rows of output [N, C] whose target [N] is among the k largest."""
    hits = output.topk(max(topk), dim=1).indices == target[:, None]  # [N, max k]
    return [float(hits[:, :k].sum().item()) for k in topk]


def accuracy(upstream):
    """`open_clip_train.zero_shot.accuracy`."""
    return count_hits


def clip_grad_norm(upstream):
    """`torch.nn.utils.clip_grad_norm_`: leaves out parameters that are marked as `unclipped`."""
    @wraps(upstream)
    def clip(parameters, *args, **kwargs):
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return upstream([p for p in parameters if not getattr(p, "unclipped", False)], *args, **kwargs)
    return clip


def distributed_data_parallel(upstream):
    """`torch.nn.parallel.DistributedDataParallel`, still a class: works on the CPU, costs a captioner less."""
    parameters = signature(upstream)
    sync_buffers = "forward_sync_buffers" if "forward_sync_buffers" in parameters.parameters else "broadcast_buffers"

    class DistributedDataParallel(upstream):
        def __init__(self, *args, **kwargs):
            call = parameters.bind(*args, **kwargs)
            module = call.arguments["module"]
            if "device_ids" in call.arguments and next(module.parameters()).device.type == "cpu":
                call.arguments["device_ids"] = None
            if isinstance(module, Captioner):  # its buffers are constants, its gradients need no second copy
                if not {"broadcast_buffers", "forward_sync_buffers"} & set(call.arguments):
                    call.arguments[sync_buffers] = False
                call.arguments.setdefault("gradient_as_bucket_view", True)
            super().__init__(*call.args, **call.kwargs)

        def load_state_dict(self, state_dict, strict=True, assign=False):
            """Of one process or of several."""
            return self.module.load_state_dict(weights.bare_names(state_dict), strict, assign)
    return DistributedDataParallel
