"""Claims about the replaced attributes of OpenCLIP and webdataset."""
import inspect
from argparse import Namespace
from importlib import import_module, metadata

import open_clip
import pytest
import torch
from benchmark.models import save_clip
from conftest import REPO, png, refused, run, tiny_captioner
from strategies import tar
from syntax import internals, upstream_writes
from torchvision.transforms.functional import pil_to_tensor
from training import equal

import open_clip_mdc
from open_clip_mdc.integration import patches as integration
from open_clip_mdc.integration import training as hooks
from open_clip_mdc.integration.openclip import MAJOR
from open_clip_mdc.integration.prefetch import pair

# What is imported and is no public interface: "module:name", what it is needed for. A new upstream version is tried
# against this list and the tables of patches.py.
IMPORTED = {
    "open_clip.coca_model:CoCa": "names the model whose captions we score and decode",
    "open_clip.factory:SimpleTokenizer": "a captioner's tokenizer, after the replacement of patches.py",
    "open_clip.factory:_MODEL_CONFIGS": "register adds the model configs",
    "open_clip.model:CLIPTextCfg": "the text_cfg of a captioner",
    "open_clip.model:CLIPVisionCfg": "the vision_cfg of a captioner",
    "open_clip.model:_build_text_tower": "the text tower beside a decoder is OpenCLIP's",
    "open_clip.model:_build_vision_tower": "the image encoder is OpenCLIP's",
    "open_clip.modified_resnet:ModifiedResNet": "the image tower of CLIP's ResNets, whose last map gives the tokens",
    **({"open_clip.task:ImageTextTask": "model and loss as the loop of 4.x trains them"} if MAJOR > 3 else {}),
    "open_clip.model:resize_pos_embed": "a tower's position embedding is resized as OpenCLIP does it",
    "open_clip.timm_model:TimmModel": "tells a timm encoder from a native one",
    "open_clip.transform:PreprocessCfg": "what a frozen tower's images go through",
    "open_clip.transform:image_transform_v2": "the same",
    "open_clip.transform:image_transform": "--aug-cfg is tried on an image before the model is built",
    "open_clip.tokenizer:SimpleTokenizer": "byte_decoder and bpe_ranks, from which smaller vocabularies are cut",
    "open_clip.tokenizer:bytes_to_unicode": "the order of its first ids, which tells digits",
    "open_clip.transformer:LayerNorm": "the decoder's layers are those of OpenCLIP's text tower",
    "open_clip.transformer:LayerNormFp32": "the same, under --precision bf16",
    "open_clip.transformer:QuickGELU": "the same, where a config asks for it",
    "open_clip.transformer:ResidualAttentionBlock": "tells the blocks that other libraries have too",
    "open_clip.transformer:VisionTransformer": "attn_pool decides which feature of CLIP is probed",
    "timm.layers:to_2tuple": "an image size of one number or two becomes a tuple of two",
    "open_clip_train.data:CsvDataset": "the data set of a CSV file, of which we name what cannot be read",
    "open_clip_train.data:DataInfo": "what upstream's data functions return",
    "open_clip_train.data:ResampledShards2": "its worker_seed is set, for --dataset-resampled",
    "open_clip_train.data:SharedEpoch": "tells workers the epoch, by which they are seeded",
    "open_clip_train.data:get_dataset_size": "refuses an unknown number of samples before the model is built",
    "open_clip_train.distributed:world_info_from_env": "shards are counted against processes",
    "open_clip_train.main:main": "the training command",
    "open_clip_train.main:parse_args": "flags are checked before anything is built",
    "open_clip_train.params:parse_args": "the flags of training as they are without ours",
    "open_clip_train.precision:get_autocast": "validation and scoring run under the training's --precision",
    "timm.data:create_transform": "an export is compared by what timm will see of a picture",
    "timm.data.naflex_transforms:patchify_image": "cuts images as GenLIP of OpenCLIP 4.x reads them",
    "timm.optim:create_optimizer_v2": "--opt timm/NAME is tried by a step before the model is built",
    "timm.models:save_for_hf": "the exported folder is as timm writes it",
    "webdataset.filters:_shuffle": "finds the sample shuffle, which upstream leaves unseeded",
    "webdataset.handlers:reraise_exception": "what webdataset does with an error by default",
    "webdataset.gopen:gopen": "shards are read as a stream, from files and URLs",
    "webdataset.tariterators:base_plus_ext": "members of a shard are named as in training",
    "webdataset.writer:TarWriter": "shards are written",
    "clip_benchmark.cli:main_build": "the CSV of all results",
    "clip_benchmark.cli:main_eval": "the loop over models, data sets and languages",
    "clip_benchmark.datasets.builder:build_dataset": "the data sets that are not ours",
    "clip_benchmark.datasets.builder:get_dataset_collate_fn": "their batches",
    "clip_benchmark.datasets.builder:get_dataset_default_task": "their tasks, for --task auto",
    "clip_benchmark.datasets.builder:__file__": "its class names and prompts lie beside it",
    "clip_benchmark.datasets.builder:value_from_first_key_found": "prompts of class folders",
    "clip_benchmark.metrics.zeroshot_classification:average_precision_per_class": "images of several classes",
    "clip_benchmark.metrics.zeroshot_classification:run_classification": "a CLIP model's logits are upstream's",
    "clip_benchmark.metrics.zeroshot_classification:zero_shot_classifier": "the same",
    "clip_benchmark.metrics.zeroshot_retrieval:evaluate": "a CLIP model's retrieval is upstream's",
    "clip_benchmark.models:load_clip": "models that are no captioners",
    "clip_benchmark.models.nllb_clip:set_language": "as upstream does for these models",
}


@pytest.fixture(autouse=True)
def unregistered():
    open_clip_mdc.unregister()
    yield
    open_clip_mdc.unregister()


TARGETS = [row.target for row in integration.LOADING + integration.TRAINING]


def attribute(target: str):
    module, name = target.split(":")
    return getattr(import_module(module), name)


def test_importing_the_package_changes_nothing_upstream():
    run("python", "-c", f"""
from importlib import import_module
def get(t): m, a = t.split(":"); return getattr(import_module(m), a)
before = [get(t) for t in {TARGETS!r}]
import open_clip, open_clip_mdc
assert all(a is get(t) for a, t in zip(before, {TARGETS!r}))
assert not any("MDC" in m for m in open_clip.list_models())
""")


PROCESS = """
import sys, torch, torch.distributed as dist
from importlib import import_module
from PIL import Image
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP  # as most training scripts begin
def get(t): m, a = t.split(":"); return getattr(import_module(m), a)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
before, was = DDP(torch.nn.Linear(2, 2)), {{t: get(t) for t in {names!r}}}
import open_clip_mdc
model = open_clip_mdc.load("photo", device="cpu")
assert model.caption([Image.new("RGB", (64, 64))], length=2) and model.features([Image.new("RGB", (64, 64))]).any()
assert [t for t in was if get(t) is not was[t]] == []
after = DDP(torch.nn.Linear(2, 2))
assert all(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in (before, after))
assert list(get_model_state_dict(after)) == ["weight", "bias"]
dist.destroy_process_group()
"""


def test_a_captioner_loads_and_captions_and_leaves_the_process_to_the_user(tmp_path):
    """A script that trains something else captions samples meanwhile. Only OpenCLIP's factory knows of captioners."""
    others = [target for target in TARGETS if not target.startswith(("open_clip:", "open_clip.factory:"))]
    assert len(others) == len(integration.TRAINING) == 16 and len(integration.LOADING) == 10
    run("python", "-c", PROCESS.format(names=others), str(tmp_path / "group"))


def test_register_twice_is_once_and_unregister_restores_every_attribute():
    before = {target: attribute(target) for target in TARGETS}
    models = open_clip.list_models()
    open_clip_mdc.register(training=True)
    once = {t: attribute(t) for t in before}
    open_clip_mdc.register(training=True)
    assert all(attribute(t) is once[t] is not before[t] for t in before)
    assert set(open_clip.list_models()) - set(models) == set(open_clip_mdc.packaged_configs())
    open_clip_mdc.unregister()
    assert all(attribute(t) is before[t] for t in before)
    assert open_clip.list_models() == models


def test_longer_context_and_larger_images_load_a_checkpoint_by_resizing(tmp_path):
    open_clip_mdc.register()
    torch.save(open_clip.create_model("MDC-ViT-Ti-8").state_dict(), tmp_path / "model.pt")
    model = open_clip.create_model("MDC-ViT-Ti-8", str(tmp_path / "model.pt"), force_image_size=64,
                                   force_context_length=40)
    assert model.text.positional_embedding.shape[0] == 40 and model.visual.positional_embedding.shape[0] == 65


def test_replaced_functions_take_arguments_with_no_more_attributes_than_upstreams_own_need(tmp_path):
    """They are called as in OpenCLIP's tests, with parsed flags that have no rank, no seed and no model's name."""
    (tmp_path / "0.tar").write_bytes(tar({"0.png": png(0), "0.txt": b"a red circle"}))
    integration.register(training=True)
    data, main = import_module("open_clip_train.data"), import_module("open_clip_train.main")
    args = import_module("open_clip_train.params").parse_args([])
    vars(args).update(train_data=str(tmp_path / "0.tar"), train_num_samples=3, dataset_resampled=True, workers=0,
                      world_size=1, batch_size=1)
    info = data.get_wds_dataset(args, pil_to_tensor, is_train=True, tokenizer=lambda text: [text])
    assert [text for _, [text] in map(pair, info.dataloader)] == ["a red circle"] * 3

    few = Namespace(rank=0, device="cpu", precision="fp32", distill=False, accum_freq=1, log_every_n_steps=9,
                    skip_scheduler=True, grad_clip_norm=None, horovod=False, batch_size=1, world_size=1, wandb=False,
                    save_logs=False, zeroshot_frequency=0, epochs=1, distributed=False)
    model = open_clip.create_model(save_clip(tmp_path)[0], output_dict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = [{"image": torch.rand(3, 48, 48), "text": torch.full((32,), i)} for i in (1, 2)]
    loader = torch.utils.data.DataLoader(rows if MAJOR > 3 else [tuple(row.values()) for row in rows], 2)
    loader.num_batches, loader.num_samples = 1, 2
    before = model.visual.proj.clone()
    if MAJOR > 3:
        from open_clip.task import CLIPTask
        task = CLIPTask(model)
        main.train_one_epoch(main.TrainState(task, optimizer, None, None, 0), {"train": data.DataInfo(loader)}, few)
    else:
        task = model
        main.train_one_epoch(model, {"train": data.DataInfo(loader)}, open_clip.ClipLoss(), 0, optimizer, None, None,
                             None, few)
    assert not torch.equal(model.visual.proj, before)
    assert main.evaluate(task, {}, 1, few) == {}


@pytest.mark.parametrize("distribution", sorted(integration.SUPPORTED))
def test_an_unsupported_upstream_is_refused_in_one_line(monkeypatch, distribution):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.0.0" if name == distribution else real(name))
    said = refused(ImportError, integration.check_version, distribution)
    assert distribution in said and "9.0.0" in said


def test_ddp_passes_every_argument_through_and_adds_only_what_nobody_chose():
    """All libraries of a process get this class, with arguments by place as well as by name."""
    calls = []

    class Upstream:
        def __init__(self, module, device_ids=None, output_device=None, dim=0, broadcast_buffers=True,
                     gradient_as_bucket_view=False, static_graph=False):
            calls.append({name: value for name, value in locals().items() if name not in ("self", "module", "calls")})

    ddp = hooks.distributed_data_parallel(Upstream)
    on_cpu, on_meta, captioner = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"), tiny_captioner()
    plain = dict(device_ids=None, output_device=None, dim=0, broadcast_buffers=True, gradient_as_bucket_view=False,
                 static_graph=False)
    for given, expected in (
        (ddp(on_cpu, [0], None, 1), {**plain, "dim": 1}),
        (ddp(on_cpu, device_ids=["cpu"], static_graph=True), {**plain, "static_graph": True}),
        (ddp(on_meta, [0], None, 2, False), {**plain, "device_ids": [0], "dim": 2, "broadcast_buffers": False}),
        (ddp(captioner), {**plain, "broadcast_buffers": False, "gradient_as_bucket_view": True}),
        (ddp(captioner, None, None, 0, True, False), plain),
    ):
        assert calls.pop(0) == expected and isinstance(given, Upstream)
    assert set(plain) <= set(inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters)
    with pytest.raises(TypeError):
        ddp(on_cpu, no_such_option=1)


SOURCES = [*REPO.glob("src/**/*.py"), *REPO.glob("clip_benchmark_ext/**/*.py")]


def test_nothing_else_writes_to_an_upstream_package():
    """Only integration/patches.py may write. Every other file only reads."""
    for path in SOURCES:
        lines = upstream_writes(path.read_text(encoding="utf-8"))
        assert not lines or path.name == "patches.py", f"{path.name}:{lines[0]} writes to an upstream package"


@pytest.mark.parametrize("source", [
    "import open_clip\nopen_clip.factory.get_tokenizer = None",
    "from open_clip_train import main as m\nm.evaluate, x = 1, 2",
    "import open_clip.factory as f\nf._MODEL_CONFIGS['MDC'] = {}",
    "from open_clip.factory import _MODEL_CONFIGS\nown = _MODEL_CONFIGS\nown.pop('RN50')",
    "from importlib import import_module\nimport_module('open_clip.factory').get_tokenizer = None",
    "from clip_benchmark.models import MODEL_TYPES\nMODEL_TYPES += ['captioner']",
    "import open_clip\nset_it = setattr\nset_it(open_clip, 'get_tokenizer', None)",
    "import open_clip\nopen_clip.__dict__.update(get_tokenizer=None)",
    "import sys\nsys.modules['open_clip.factory'].get_tokenizer = None",
    "import torch\ndel torch.compile",
])
def test_that_check_finds_every_way_to_write(source):
    assert upstream_writes(source)


def test_that_check_lets_reading_pass():
    assert not upstream_writes("""
import open_clip, torch
from open_clip.factory import _MODEL_CONFIGS
known = dict(_MODEL_CONFIGS)
known["MDC"] = {}
names = open_clip.list_models()
names.append("MDC")
x = torch.sort(torch.zeros(3)).values
x[0] = 1
model = open_clip.create_model("RN50")
model.visual.proj = None
""")


def test_every_upstream_internal_that_is_imported_is_listed():
    """The list with which the move to another version of upstream begins."""
    taken = {address for path in SOURCES for address in internals(path.read_text(encoding="utf-8"))}
    assert taken == IMPORTED.keys(), "add to IMPORTED what it lacks, with the reason, or remove what nobody uses"
    assert None not in map(attribute, IMPORTED) and all(IMPORTED.values())


def test_clip_models_give_bit_equal_outputs_registered_or_not(tmp_path):
    image, text = torch.randn(2, 3, 48, 48), open_clip.tokenize(["a dog", "a cat on a mat!"], context_length=32)
    outputs, (name, _) = [], save_clip(tmp_path)
    for prepare in (lambda: None, open_clip_mdc.register):
        prepare()
        for custom_text in (False, True):  # CLIP, and CustomTextCLIP, whose name in the factory is replaced
            torch.manual_seed(0)
            model = open_clip.create_model(name, output_dict=True, force_custom_text=custom_text).eval()
            with torch.no_grad():
                outputs.append(model(image, text))
    for plain, registered in zip(outputs[:2], outputs[2:], strict=True):
        assert equal(plain, registered)
