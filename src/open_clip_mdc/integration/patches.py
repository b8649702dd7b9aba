"""The seam to OpenCLIP and clip_benchmark: every upstream attribute that is replaced, by what, and why.

Neither upstream has a plug-in interface, so `register()` replaces the attributes of the tables below and `unregister()`
puts them back. Nothing else in the project assigns to an upstream module (tests/core/test_integration.py reads the
syntax trees). A replacement is made by a hook that takes the upstream object and falls through to it for every model
that is no captioner, unless hooks.py says otherwise. Targets and hooks are strings: this file imports no upstream.
"""
import re
from copy import deepcopy
from importlib import import_module, metadata
from typing import NamedTuple

from . import configs, plugins


class Replacement(NamedTuple):
    """A row of the tables below."""

    target: str  # "module:attribute" upstream
    hook: str  # "module:function" of ours: takes the upstream object, returns what stands in for it
    reason: str


ANY_BASE = "a row's prefix, such as MDC-, before the name of any config with a ViT image tower is a captioner"
NO_SIGLIP = "upstream gives SigLIP's tokenizer to every name that contains it; a captioner's words are CLIP's BPE"

OPEN_CLIP = (
    Replacement("open_clip.factory:get_model_config", "open_clip_mdc.integration.factory:get_model_config", ANY_BASE),
    Replacement("open_clip:get_model_config", "open_clip_mdc.integration.factory:get_model_config", ANY_BASE),
    Replacement("open_clip:get_tokenizer", "open_clip_mdc.integration.factory:get_tokenizer", NO_SIGLIP),
    Replacement("open_clip_train.main:get_tokenizer", "open_clip_mdc.integration.factory:get_tokenizer", NO_SIGLIP),
    Replacement("open_clip.factory:CustomTextCLIP", "open_clip_mdc.integration.factory:model_class",
                "create_model picks the class by config key and knows no caption_cfg"),
    Replacement("open_clip.factory:SimpleTokenizer", "open_clip_mdc.integration.factory:tokenizer_class",
                "a packaged merges file is named in model configs, which cannot hold this machine's paths"),
    Replacement("open_clip.factory:load_state_dict", "open_clip_mdc.integration.saving:load_state_dict",
                "a changed bit, NaN and what wrappers put before names load in silence or as missing keys"),
    Replacement("open_clip.factory:load_checkpoint", "open_clip_mdc.integration.saving:load_checkpoint",
                "a file of another model, or none, ends in a list of hundreds of names or a traceback"),
    Replacement("open_clip:load_checkpoint",
                "open_clip_mdc.integration.saving:load_checkpoint", "the same by its public name"),
    Replacement("open_clip_train.main:get_latest_checkpoint", "open_clip_mdc.integration.saving:get_latest_checkpoint",
                "upstream goes by names, where an old epoch_latest.pt comes last"),
    Replacement("open_clip_train.main:parse_args", "open_clip_mdc.integration.arguments:parse_args",
                "--allow-nonfinite-loss, of which upstream knows nothing"),
    Replacement("open_clip_train.main:setup_logging", "open_clip_mdc.integration.training:setup_logging",
                "it has PyTorch report at every end on graphs that were never compiled"),
    Replacement("open_clip_train.main:create_loss", "open_clip_mdc.integration.training:create_loss",
                "the loss of a captioner is CaptionLoss"),
    Replacement("open_clip_train.data:get_wds_dataset", "open_clip_mdc.integration.data:get_wds_dataset",
                "its sample shuffle is seeded by process id and clock; a sample may have several captions"),
    Replacement("open_clip_train.main:get_data", "open_clip_mdc.integration.data:get_data",
                "upstream's images travel as floats, from pageable memory, while the device waits"),
    Replacement("webdataset.gopen:gopen", "open_clip_mdc.integration.data:gopen",
                "a file that is called pipe:COMMAND.tar, which *.tar may stand for, would run the command"),
    Replacement("webdataset.tariterators:tar_file_iterator", "open_clip_mdc.integration.data:tar_file_iterator",
                "a member of any size is read to memory, 3 GB of a tar.gz of 14 MB"),
    Replacement("open_clip_train.data:CsvDataset", "open_clip_mdc.integration.data:csv_dataset",
                "it drops, joins and renames rows of tables with quotes, and does not name a bad image"),
    Replacement("open_clip_train.main:pt_load", "open_clip_mdc.integration.saving:pt_load",
                "a damaged file is read without complaint, and one of torchrun does not fit one process"),
    Replacement("open_clip_train.main:train_one_epoch", "open_clip_mdc.integration.training:train_one_epoch",
                "upstream seeds once a process, so a resumed run would repeat the first epoch's noise; it saves NaN"),
    Replacement("open_clip_train.main:evaluate", "open_clip_mdc.integration.training:evaluate",
                "upstream's validation needs encode_text, and a failure there loses the epoch's checkpoint"),
    Replacement("open_clip_train.train:zero_shot_eval", "open_clip_mdc.integration.training:validation_metrics",
                "the place whose metrics upstream logs to results.jsonl, tensorboard and wandb"),
    Replacement("open_clip_train.zero_shot:accuracy", "open_clip_mdc.integration.metrics:accuracy",
                "numpy 2.4 refuses float() of an array with one element"),
    Replacement("torch:save", "open_clip_mdc.integration.saving:save",
                "a run that is killed while it saves leaves half a checkpoint, which --resume latest takes for one"),
    Replacement("PIL.EpsImagePlugin:gs_binary", "open_clip_mdc.integration.data:no_program",
                "Pillow hands an EPS, under whatever name, to Ghostscript; training images come from anybody"),
    Replacement("torch.nn.utils:clip_grad_norm_", "open_clip_mdc.integration.training:clip_grad_norm",
                "--grad-clip-norm would count the length head's gradient, which must not change other steps"),
    Replacement("torch.nn.parallel:DistributedDataParallel",
                "open_clip_mdc.integration.training:distributed_data_parallel",
                "upstream passes device_ids, which DDP refuses for a module on the CPU, and no cheaper options"),
)

SUPPORTED = {"open_clip_torch": r"3\.3\.", "clip_benchmark": r"1\.6\."}

_replaced: dict[str, object] = {}  # target -> upstream object
_added_configs: list[str] = []


def _resolve(address: str) -> tuple[object, str]:
    module, attribute = address.split(":")
    return import_module(module), attribute


def check_version(distribution: str) -> None:
    """Raises ImportError, in one line, for a version whose internals the table was not tried on."""
    installed = metadata.version(distribution)
    if not re.match(SUPPORTED[distribution], installed):
        wanted = SUPPORTED[distribution].replace("\\", "") + "*"
        raise ImportError(f"open_clip_mdc works with {distribution} {wanted}, but {installed} is installed: "
                          f"pip install '{distribution}=={wanted}'")


def packaged_configs() -> dict[str, dict]:
    """The model configs that `register()` adds to OpenCLIP's list, by name: small towers and the paper's captioners."""
    known = import_module("open_clip").get_model_config
    towers = configs.architectures()
    return towers | {name: configs.captioner(name, lambda base: deepcopy(towers.get(base)) or known(base))
                     for name in configs.listed()}


def register(table: tuple[Replacement, ...] = OPEN_CLIP) -> None:
    """Makes captioners models of OpenCLIP: adds the configs and applies the table. Calling it again changes nothing.

    Raises:
        ImportError: an upstream version that is not supported.
    """
    check_version("open_clip_torch")
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
    """Puts every upstream attribute back and removes the configs."""
    while _replaced:
        target, upstream = _replaced.popitem()
        module, attribute = _resolve(target)
        setattr(module, attribute, upstream)
    known = import_module("open_clip.factory")._MODEL_CONFIGS
    while _added_configs:
        known.pop(_added_configs.pop(), None)
