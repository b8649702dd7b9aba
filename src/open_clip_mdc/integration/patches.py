"""The tables of all attributes that are replaced in OpenCLIP, webdataset and PyTorch, by what, and why.

OpenCLIP has no plug-in interface, so `register()` replaces what loading a captioner needs, functions of OpenCLIP's
factory. `register(training=True)`, which only open_clip_train calls, replaces what training needs, too. `unregister()`
puts everything back. Nothing else in the project assigns to another package's module (tests/core/test_integration.py).

A plain CLIP run gives the same bits, except for seeds, resuming and rotated images. The reason of such a row begins
with "CLIP too" (tests/core/test_loading.py). Targets and hooks are strings, so this file imports none of them.
"""
from copy import deepcopy
from importlib import import_module, metadata
from typing import NamedTuple

from . import configs, plugins
from .openclip import version


class Replacement(NamedTuple):
    """A row of a table."""

    target: str  # "module:attribute" of OpenCLIP, webdataset or PyTorch
    hook: str  # "module:function" of this package, which takes the original and returns its replacement
    reason: str


ANY_BASE = "a prefix such as MDC- in front of any config's name makes it a captioner"
NO_SIGLIP = "OpenCLIP gives SigLIP's tokenizer to every name with siglip in it, but captioners use CLIP's BPE"

LOADING = (
    Replacement("open_clip.factory:get_model_config", ".factory:get_model_config", ANY_BASE),
    Replacement("open_clip:get_model_config", ".factory:get_model_config", ANY_BASE),
    Replacement("open_clip:get_tokenizer", ".factory:get_tokenizer", NO_SIGLIP),
    Replacement("open_clip.factory:create_model", ".factory:create_model",
                "pretrained_image starts a captioner's image tower, where OpenCLIP would load only a part of it"),
    Replacement("open_clip:create_model", ".factory:create_model", "the same under its public name"),
    Replacement("open_clip.factory:CustomTextCLIP", ".factory:model_class",
                "create_model picks the class by config keys, and does not know caption_cfg"),
    Replacement("open_clip.factory:SimpleTokenizer", ".factory:tokenizer_class",
                "model configs name a packaged merges file, as they cannot hold this machine's paths. Texts are cut "
                "before BPE, which takes minutes for one long word, at many times the tokens of the context"),
    Replacement("open_clip.factory:load_state_dict", ".saving:load_state_dict",
                "changed bits and NaN load without an error, and prefixes of wrappers as missing keys"),
    Replacement("open_clip.factory:load_checkpoint", ".saving:load_checkpoint",
                "the weights of another model end in a list of hundreds of names, and no weights in a traceback"),
    Replacement("open_clip:load_checkpoint", ".saving:load_checkpoint", "the same under its public name"),
)
SHARDS = (  # for readers of shards that are not ours
    Replacement("webdataset.gopen:gopen", ".streams:gopen",
                "a file with the name pipe:COMMAND.tar, which *.tar may match, would run the command"),
    Replacement("webdataset.tariterators:tar_file_iterator", ".streams:tar_file_iterator",
                "it reads a member of any size to memory, such as 3 GB from a tar.gz of 14 MB"),
)
TRAINING = (
    *SHARDS,
    Replacement("open_clip_train.main:get_tokenizer", ".factory:get_tokenizer", NO_SIGLIP),
    Replacement("open_clip_train.main:get_latest_checkpoint", ".saving:get_latest_checkpoint",
                "CLIP too, resuming: OpenCLIP sorts by name, by which an old epoch_latest.pt is the latest"),
    Replacement("open_clip_train.main:parse_args", ".arguments:parse_args",
                "flags that OpenCLIP does not have, such as --plugin, and --pretrained-image with a SOURCE"),
    Replacement("open_clip_train.data:get_wds_dataset", ".data:get_wds_dataset",
                "CLIP too, seeds: OpenCLIP seeds the sample shuffle by process id and clock. Both kinds of models read "
                "the same images (EXIF orientation, 16 bit) and draw one of several captions"),
    Replacement("open_clip_train.main:get_data", ".data:get_data",
                "captions are prepared while the device works, and images copied as bytes. CLIP gets the same bits"),
    Replacement("open_clip_train.data:CsvDataset", ".csv_images:csv_dataset",
                "CLIP too: OpenCLIP drops, joins or renames rows of tables with quotes"),
    Replacement("open_clip_train.main:evaluate", ".training:evaluate",
                "OpenCLIP's validation needs encode_text, and an error there loses the epoch's checkpoint. CLIP too, "
                "resuming: results of epochs that were not saved are removed"),
    Replacement("torch:save", ".saving:save",
                "CLIP too, resuming: a run that is killed while it saves leaves half a checkpoint"),
    Replacement("torch.nn.utils:clip_grad_norm_", ".training:clip_grad_norm",
                "--grad-clip-norm would count the length head's gradient, which must not change other steps"),
    Replacement("torch.nn.parallel:DistributedDataParallel", ".training:distributed_data_parallel",
                "a captioner can take cheaper options. CLIP too: DDP refuses device_ids on the CPU, and checkpoints "
                "of one process do not load"),
    Replacement(version.CREATE_LOSS, ".training:create_loss", "the loss of a captioner is CaptionLoss"),
    Replacement(version.LOAD, ".saving:pt_load",
                "CLIP too, resuming: a damaged file loads without an error, and torchrun's does not fit one process"),
    Replacement("open_clip_train.main:train_one_epoch", ".image_rates:train_one_epoch",
                "CLIP too, seeds and resuming: OpenCLIP seeds once per process, so a resumed run would repeat the "
                "noise of its first epoch. It also saves NaN"),
    Replacement(version.METRICS, ".training:validation_metrics",
                "OpenCLIP logs the metrics that this function returns. CLIP too, resuming: a row names its epoch"),
)

SUPPORTED = {"open_clip_torch": ("3.3.", "4."), "clip_benchmark": ("1.6.",)}

_replaced = {}  # target -> original
_added_configs = []  # names


def _resolve(address: str) -> tuple[object, str]:
    module, attribute = address.split(":")
    return import_module(module, __package__), attribute


def check_version(distribution: str) -> None:
    """Raise ImportError for a version that the table was not tested with."""
    installed = metadata.version(distribution)
    known = SUPPORTED[distribution]
    if not installed.startswith(known):
        raise ImportError(f"open_clip_mdc works with {distribution} {' and '.join(f'{v}*' for v in known)}, but "
                          f"{installed} is installed: pip install '{distribution}=={known[0]}*'")


def packaged_configs() -> dict[str, dict]:
    """Return the configs that `register()` adds to OpenCLIP's list by name: small towers and the paper's captioners."""
    known = import_module("open_clip").get_model_config
    towers = configs.architectures()
    return towers | {name: configs.captioner(name, lambda base: deepcopy(towers.get(base)) or known(base))
                     for name in configs.listed()}


def register(training: bool = False, table: tuple[Replacement, ...] = LOADING) -> None:
    """Add captioners to OpenCLIP: add the configs and apply the table. Calling it again changes nothing.

    `training=True` also replaces what `open_clip_train.main` needs to train captioners, in PyTorch and webdataset, too.
    """
    check_version("open_clip_torch")
    table += TRAINING if training else ()
    if any(target.startswith("clip_benchmark") for target, _, _ in table):
        check_version("clip_benchmark")
    plugins.load_installed()
    known = import_module("open_clip.factory")._MODEL_CONFIGS
    for name, config in ({} if _added_configs else packaged_configs()).items():
        if name not in known:
            known[name] = config
            _added_configs.append(name)
    for target, hook, _ in table:
        if target in _replaced:
            continue
        (module, attribute), (hooks, function) = _resolve(target), _resolve(hook)
        _replaced[target] = getattr(module, attribute)
        setattr(module, attribute, getattr(hooks, function)(_replaced[target]))


def unregister() -> None:
    """Put every attribute back, and remove the configs from OpenCLIP's list."""
    while _replaced:
        target, original = _replaced.popitem()
        module, attribute = _resolve(target)
        setattr(module, attribute, original)
    known = import_module("open_clip.factory")._MODEL_CONFIGS
    while _added_configs:
        known.pop(_added_configs.pop(), None)
