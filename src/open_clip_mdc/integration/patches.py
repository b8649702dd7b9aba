"""The seam to OpenCLIP: every attribute that is replaced, by what, and why.

OpenCLIP has no plug-in interface, so `register()` replaces the attributes of a table and `unregister()` puts them back.
Nothing else in the project assigns to another package's module (tests/core/test_integration.py reads the syntax trees).
A plain CLIP run gives the same bits, but for seeds, resume and rotated images, where the row says so
(tests/core/test_loading.py).
Targets and hooks are strings, so this file imports none of them.
"""
from copy import deepcopy
from importlib import import_module, metadata
from typing import NamedTuple

from . import configs, plugins
from .upstream import MAJOR


class Replacement(NamedTuple):
    """A row of the table."""

    target: str  # "module:attribute" of OpenCLIP, webdataset or PyTorch
    hook: str  # "module:function" here: takes the original, returns what stands in for it
    reason: str


ANY_BASE = "a row's prefix, such as MDC-, before the name of any config is a captioner"
NO_SIGLIP = "OpenCLIP gives SigLIP's tokenizer to every name that contains it; a captioner's words are CLIP's BPE"

OPEN_CLIP = (
    Replacement("open_clip.factory:get_model_config", ".factory:get_model_config", ANY_BASE),
    Replacement("open_clip:get_model_config", ".factory:get_model_config", ANY_BASE),
    Replacement("open_clip:get_tokenizer", ".factory:get_tokenizer", NO_SIGLIP),
    Replacement("open_clip_train.main:get_tokenizer", ".factory:get_tokenizer", NO_SIGLIP),
    Replacement("open_clip.factory:create_model", ".image_source:create_model",
                "pretrained_image names where a captioner's image tower starts from; OpenCLIP loads a tower in part"),
    Replacement("open_clip:create_model", ".image_source:create_model", "the same by its public name"),
    Replacement("open_clip.factory:CustomTextCLIP", ".factory:model_class",
                "create_model picks the class by config key and knows no caption_cfg"),
    Replacement("open_clip.factory:SimpleTokenizer", ".factory:tokenizer_class",
                "a packaged merges file is named in model configs, which cannot hold this machine's paths"),
    Replacement("open_clip.factory:load_state_dict", ".saving:load_state_dict",
                "a changed bit, NaN and what wrappers put before names load in silence or as missing keys"),
    Replacement("open_clip.factory:load_checkpoint", ".saving:load_checkpoint",
                "a file of another model, or none, ends in a list of hundreds of names or a traceback"),
    Replacement("open_clip:load_checkpoint", ".saving:load_checkpoint", "the same by its public name"),
    Replacement("open_clip_train.main:get_latest_checkpoint", ".saving:get_latest_checkpoint",
                "resume, of CLIP too: OpenCLIP goes by names, where an old epoch_latest.pt comes last"),
    Replacement("open_clip_train.main:parse_args", ".arguments:parse_args",
                "--plugin, --allow-nonfinite-loss and a SOURCE of --pretrained-image, which OpenCLIP does not know"),
    Replacement("open_clip_train.data:get_wds_dataset", ".data:get_wds_dataset",
                "seeds, of CLIP too: the sample shuffle is seeded by process id and clock; both read the same images "
                "(EXIF orientation, 16 bit) and draw one of several captions"),
    Replacement("open_clip_train.main:get_data", ".data:get_data",
                "captions are prepared while the device works, images travel as bytes; of CLIP the same bits"),
    Replacement("webdataset.gopen:gopen", ".data:gopen",
                "a file that is called pipe:COMMAND.tar, which *.tar may stand for, would run the command"),
    Replacement("webdataset.tariterators:tar_file_iterator", ".data:tar_file_iterator",
                "a member of any size is read to memory, 3 GB of a tar.gz of 14 MB"),
    Replacement("open_clip_train.data:CsvDataset", ".data:csv_dataset",
                "it drops, joins and renames rows of tables with quotes; both models read the same pairs"),
    Replacement("open_clip_train.main:evaluate", ".training:evaluate",
                "validation needs encode_text, and a failure there loses the epoch's checkpoint; resume, of CLIP too: "
                "results of epochs that were not saved are forgotten"),
    Replacement("torch:save", ".saving:save",
                "resume, of CLIP too: a run that is killed while it saves leaves half a checkpoint"),
    Replacement("torch.nn.utils:clip_grad_norm_", ".training:clip_grad_norm",
                "--grad-clip-norm would count the length head's gradient, which must not change other steps"),
    Replacement("torch.nn.parallel:DistributedDataParallel", ".training:distributed_data_parallel",
                "no cheaper options for a captioner; of CLIP too: device_ids, which DDP refuses on the CPU, and resume "
                "from a run of one process"),
)
# What has another name or other arguments in 4.x.
LOSS = "the loss of a captioner is CaptionLoss"
WHOLE = "resume, of CLIP too: a damaged file is read in silence, and torchrun's does not fit one process"
SEEDS = ("seeds and resume, of CLIP too: OpenCLIP seeds once a process, so a resumed run would repeat the first "
         "epoch's noise; it saves NaN")
LOGGED = "the place whose metrics OpenCLIP logs; resume, of CLIP too: a row names its epoch"
OPEN_CLIP += (
    Replacement("open_clip_train.main:create_task", ".openclip4:create_task", LOSS),
    Replacement("open_clip_train.file_utils:pt_load", ".saving:pt_load", WHOLE),
    Replacement("open_clip_train.main:train_one_epoch", ".openclip4:train_one_epoch", SEEDS),
    Replacement("open_clip_train.train:zero_shot_eval_all", ".training:validation_metrics", LOGGED),
) if MAJOR > 3 else (
    Replacement("open_clip_train.main:create_loss", ".openclip3:create_loss", LOSS),
    Replacement("open_clip_train.main:pt_load", ".saving:pt_load", WHOLE),
    Replacement("open_clip_train.main:train_one_epoch", ".openclip3:train_one_epoch", SEEDS),
    Replacement("open_clip_train.train:zero_shot_eval", ".training:validation_metrics", LOGGED),
)

SUPPORTED = {"open_clip_torch": ("3.3.", "4."), "clip_benchmark": ("1.6.",)}

_replaced: dict[str, object] = {}  # target -> original
_added_configs: list[str] = []


def _resolve(address: str) -> tuple[object, str]:
    module, attribute = address.split(":")
    return import_module(module, __package__), attribute


def check_version(distribution: str) -> None:
    """Raise ImportError for a version whose internals the table was not tried on."""
    installed = metadata.version(distribution)
    known = SUPPORTED[distribution]
    if not installed.startswith(known):
        raise ImportError(f"open_clip_mdc works with {distribution} {' and '.join(f'{v}*' for v in known)}, but "
                          f"{installed} is installed: pip install '{distribution}=={known[0]}*'")


def packaged_configs() -> dict[str, dict]:
    """Return the configs that `register()` adds to OpenCLIP's list, by name: small towers, the paper's captioners."""
    known = import_module("open_clip").get_model_config
    towers = configs.architectures()
    return towers | {name: configs.captioner(name, lambda base: deepcopy(towers.get(base)) or known(base))
                     for name in configs.listed()}


def register(table: tuple[Replacement, ...] = OPEN_CLIP) -> None:
    """Make captioners models of OpenCLIP: add the configs and apply the table. Calling it again changes nothing."""
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
    """Put every attribute back and remove the configs."""
    while _replaced:
        target, original = _replaced.popitem()
        module, attribute = _resolve(target)
        setattr(module, attribute, original)
    known = import_module("open_clip.factory")._MODEL_CONFIGS
    while _added_configs:
        known.pop(_added_configs.pop(), None)
