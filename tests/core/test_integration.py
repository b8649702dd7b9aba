"""Claims about the seam to the upstream packages.    pytest tests/core/test_integration.py"""
import ast
import inspect
from importlib import import_module, metadata

import open_clip
import pytest
import torch
from conftest import REPO, run, tiny_captioner

import open_clip_mdc
from open_clip_mdc import hooks, integration
from open_clip_mdc.model import Captioner


@pytest.fixture(autouse=True)
def unregistered():
    open_clip_mdc.unregister()
    yield
    open_clip_mdc.unregister()


def attribute(target: str):
    module, name = target.split(":")
    return getattr(import_module(module), name)


def test_importing_the_package_changes_nothing_upstream():
    names = [r.target for r in integration.OPEN_CLIP]
    run("python", "-c", f"""
from importlib import import_module
def get(t): m, a = t.split(":"); return getattr(import_module(m), a)
before = [get(t) for t in {names!r}]
import open_clip, open_clip_mdc
assert all(a is get(t) for a, t in zip(before, {names!r}))
assert not any("MDC" in m for m in open_clip.list_models())
""")


def test_register_twice_is_once_and_unregister_restores_every_attribute():
    before = {r.target: attribute(r.target) for r in integration.OPEN_CLIP}
    models = open_clip.list_models()
    open_clip_mdc.register()
    once = {t: attribute(t) for t in before}
    open_clip_mdc.register()
    assert all(attribute(t) is once[t] is not before[t] for t in before)
    assert set(open_clip.list_models()) - set(models) == set(open_clip_mdc.packaged_configs())
    open_clip_mdc.unregister()
    assert all(attribute(t) is before[t] for t in before)
    assert open_clip.list_models() == models


def test_clip_models_give_bit_equal_outputs_registered_or_not():
    image, text = torch.randn(2, 3, 224, 224), open_clip.tokenize(["a dog", "a cat on a mat!"])
    outputs = []
    for prepare in (lambda: None, open_clip_mdc.register):
        prepare()
        for custom_text in (False, True):  # CLIP, and CustomTextCLIP, whose name in the factory is replaced
            torch.manual_seed(0)
            model = open_clip.create_model("ViT-B-32", output_dict=True, force_custom_text=custom_text).eval()
            with torch.no_grad():
                outputs.append(model(image, text))
            del model
    for plain, registered in zip(outputs[:2], outputs[2:], strict=True):
        assert plain.keys() == registered.keys()
        assert all(torch.equal(plain[k], registered[k]) for k in plain)


def test_the_public_functions_register_by_themselves():
    model, train_transform, transform = open_clip_mdc.create_model_and_transforms("MDC-ViT-Ti-8")
    tokenizer = open_clip_mdc.get_tokenizer("MDC-ViT-Ti-8")
    assert isinstance(model, Captioner) and model.vocab_size == tokenizer.vocab_size < 1000
    assert tokenizer(["a red circle"]).shape == (1, 77)
    assert train_transform is not None and transform is not None
    assert open_clip_mdc.is_captioner("MDC-ViT-Ti-8") and not open_clip_mdc.is_captioner("ViT-B-32")


def test_force_options_of_upstream_reach_a_captioner():
    open_clip_mdc.register()
    model = open_clip.create_model("MDC-ViT-Ti-8", force_image_size=48, force_context_length=20)
    assert model.visual.image_size == (48, 48) and model.text.positional_embedding.shape[0] == 20
    assert model.encode_image_tokens(torch.zeros(1, 3, 48, 48)).shape[1] == 36


def test_longer_context_and_larger_images_load_a_checkpoint_by_resizing(tmp_path):
    open_clip_mdc.register()
    torch.save(open_clip.create_model("MDC-ViT-Ti-8").state_dict(), tmp_path / "model.pt")
    model = open_clip.create_model("MDC-ViT-Ti-8", str(tmp_path / "model.pt"), force_image_size=64,
                                   force_context_length=40)
    assert model.text.positional_embedding.shape[0] == 40 and model.visual.positional_embedding.shape[0] == 65


@pytest.mark.parametrize("distribution", sorted(integration.SUPPORTED))
def test_an_unsupported_upstream_is_refused_in_one_line(monkeypatch, distribution):
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "9.0.0" if name == distribution else real(name))
    with pytest.raises(ImportError, match=f"{distribution}.*9.0.0") as error:
        integration.check_version(distribution)
    assert "\n" not in str(error.value)


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
    real = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    assert set(plain) <= set(real)
    with pytest.raises(TypeError):
        ddp(on_cpu, no_such_option=1)


def test_nothing_else_assigns_to_an_upstream_module():
    """Only integration.py may set attributes of modules that are not ours."""
    upstream = {"open_clip", "open_clip_train", "clip_benchmark", "torch", "timm", "webdataset"}
    for path in [*REPO.glob("src/**/*.py"), *REPO.glob("clip_benchmark_ext/*.py")]:
        tree = ast.parse(path.read_text())
        modules = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] in upstream}
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in upstream:
                modules |= {a.asname or a.name for a in node.names}
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                while isinstance(target, ast.Attribute):
                    target = target.value
                    if isinstance(target, ast.Name):
                        assert target.id not in modules, f"{path.name}:{node.lineno} assigns to {target.id}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                assert path.name == "integration.py", f"{path.name}:{node.lineno} calls setattr"
