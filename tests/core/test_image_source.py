"""Claims about --pretrained-image: an image tower of any library gives its own tokens here.

Each family's own library makes random weights, saves them and runs them.
"""

import open_clip
import pytest
import timm
import torch
from conftest import images, refused, run_folder, run_tool, seeded, write_json
from safetensors.torch import save_file
from test_image_settings import export
from training import checkpoint, holds, open_clip_train, tower, weights

import open_clip_mdc
from open_clip_mdc.models import towers as of_models

transformers = pytest.importorskip("transformers")

TEXT = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1}
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8,
             intermediate_size=64)


@pytest.fixture(autouse=True)
def towers(tmp_path, monkeypatch):
    """Small towers by name: OpenCLIP's ViTs, with CLIP's activation, CoCa's pooling and DINOv2's layer scale."""
    native = dict(image_size=32, patch_size=8, width=32, head_width=16, layers=2, mlp_ratio=2.0)
    configs = {
        "tiny": native, "tiny-quickgelu": native, "tiny-wide": native | {"width": 64},
        "tiny-coca": native | {"attentional_pool": True},
        "tiny-dino": native | {"no_ln_pre": True, "ls_init_value": 1.0, "norm_kwargs": {"eps": 1e-6}, "mlp_ratio": 4.0},
        "tiny-rn": dict(layers=[1, 1, 1, 1], width=8, head_width=64, image_size=64),
        "tiny-timm": dict(timm_model_name="test_vit", image_size=32, timm_pool="avg"),
    }
    folder = tmp_path / "configs"
    for name, vision_cfg in configs.items():
        write_json(folder / f"{name}.json", {"embed_dim": 32, "vision_cfg": vision_cfg, "text_cfg": TEXT,
                                             "quick_gelu": name == "tiny-quickgelu"})
    open_clip_mdc.unregister()  # an earlier file may have left its configs there
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIGS", dict(open_clip.factory._MODEL_CONFIGS))
    monkeypatch.setattr(open_clip.factory, "_MODEL_CONFIG_PATHS", [])
    open_clip.add_model_config(folder)
    open_clip_mdc.register()
    yield
    open_clip_mdc.unregister()


def random(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights of which none is 0 or 1, as biases, norms and scales are at first."""
    generator = seeded(0)
    for x in model.state_dict().values():  # which have no gradients
        if x.ndim == 1:
            x.uniform_(0.1, 0.6, generator=generator)
        elif x.is_floating_point():
            x.normal_(std=0.2, generator=generator)
    return model.eval()


def create(name: str, source, **options):
    return open_clip_mdc.create_model_and_transforms(name, pretrained_image=source, **options)[0]


@torch.no_grad()
def assert_gives(model, expected: torch.Tensor, image: torch.Tensor) -> None:
    found = model.eval().encode_image_tokens(image)
    assert found.shape == expected.shape and (found - expected).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("saved_as", ["torch", "safetensors", "training", "visual"])
def test_a_clip_model_of_openclip(tmp_path, saved_as):
    clip = random(open_clip.create_model("tiny"))
    path = tmp_path / "clip.pt"
    if saved_as == "safetensors":
        save_file({name: x.contiguous() for name, x in clip.state_dict().items()}, path)
    elif saved_as == "training":
        torch.save({"epoch": 3, "state_dict": {f"module.{n}": x for n, x in clip.state_dict().items()}}, path)
    else:
        torch.save(clip.state_dict() if saved_as == "torch" else clip.visual.state_dict(), path)
    image = images(2, 32)
    clip.visual.output_tokens, clip.visual.pool_type = True, "avg"  # all tokens after the last norm
    clip.visual.final_ln_after_pool = False
    assert_gives(create("MDC-tiny", path), clip.visual(image)[1], image)


@torch.no_grad()
def test_a_coca_model_by_the_norm_before_its_pooling(tmp_path):
    visual = random(of_models._build_vision_tower(32, open_clip.get_model_config("tiny-coca")["vision_cfg"]))
    torch.save({f"visual.{name}": x for name, x in visual.state_dict().items()}, tmp_path / "coca.pt")
    image, seen = images(2, 32), []
    visual.attn_pool.ln_k.register_forward_hook(lambda module, given, output: seen.append(output))
    visual(image)
    assert_gives(create("MDC-tiny", tmp_path / "coca.pt"), seen[0][:, 1:], image)


@torch.no_grad()
def test_clips_resnet(tmp_path):
    clip = random(open_clip.create_model("tiny-rn"))
    torch.save(clip.state_dict(), tmp_path / "clip.pt")
    image, seen = images(2, 64), []
    clip.visual.layer4.register_forward_hook(lambda module, given, output: seen.append(output))
    clip.visual(image)
    expected = torch.nn.functional.layer_norm(seen[0].flatten(2).mT, seen[0].shape[1:2])
    assert_gives(create("MDC-tiny-rn", tmp_path / "clip.pt"), expected, image)


@torch.no_grad()
@pytest.mark.parametrize("name", ["test_vit", "test_vit2", "test_efficientnet", "test_resnet", "test_convnext",
                                  "vit_tiny_patch16_224"])
def test_an_encoder_of_timm_with_its_classifier(tmp_path, name):
    model = random(timm.create_model(name, num_classes=7))
    torch.save(model.state_dict(), tmp_path / "model.pth")
    image = images(1, model.pretrained_cfg["input_size"][-1])
    expected = model.forward_features(image)
    captioner = create(f"MDC-small-timm-{name}", tmp_path / "model.pth")
    tower = of_models.tower(captioner.visual)
    if expected.ndim == 4:
        expected = torch.nn.functional.layer_norm(expected.flatten(2).mT, expected.shape[1:2])
        assert not tower.has_class_token and tower.num_layers == 1
    else:
        expected = expected[:, model.num_prefix_tokens:]
        if isinstance(model.norm, torch.nn.Identity):  # it is the mean of the tokens that timm normalises
            expected = model.fc_norm(expected)
    assert_gives(captioner, expected, image)
    assert captioner.visual.preprocess_cfg["mean"] == list(model.pretrained_cfg["mean"])


@torch.no_grad()
def test_timms_clip_and_dinov2_are_native_towers(tmp_path):
    """The convolution's bias, which DINOv2 has and OpenCLIP's ViT has not, goes into the positions."""
    image = images(2, 32)
    options = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=0)
    for name, arch, extra in (("MDC-tiny", "vit_base_patch32_clip_224", {"mlp_ratio": 2}),
                              ("MDC-tiny-dino", "vit_small_patch14_dinov2", {})):
        model = random(timm.create_model(arch, **options | extra))
        save_file(model.state_dict(), tmp_path / "w.safetensors")
        assert_gives(create(name, tmp_path / "w.safetensors"), model.forward_features(image)[:, 1:], image)


@torch.no_grad()
@pytest.mark.parametrize("with_text", [False, True])
def test_clip_of_transformers(tmp_path, with_text):
    config = transformers.CLIPVisionConfig(**SIZES, hidden_act="quick_gelu")
    if with_text:
        text = transformers.CLIPTextConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                           num_attention_heads=2)
        config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=config.to_dict())
        model = random(transformers.CLIPModel(config))
        vision = model.vision_model
    else:
        model = vision = random(transformers.CLIPVisionModel(config))
    model.save_pretrained(tmp_path / "clip")
    write_json(tmp_path / "clip/preprocessor_config.json",
               {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]})
    image = images(2, 32)
    vision = getattr(vision, "vision_model", vision)
    expected = vision.post_layernorm(vision(image).last_hidden_state[:, 1:])
    captioner, _, transform = open_clip_mdc.create_model_and_transforms("MDC-tiny-quickgelu",
                                                                        pretrained_image=tmp_path / "clip")
    assert_gives(captioner, expected, image)
    assert captioner.visual.preprocess_cfg["mean"] == [0.1, 0.2, 0.3]
    assert tuple(transform.transforms[-1].std) == (0.4, 0.5, 0.6)
    (tmp_path / "clip/config.json").unlink()
    alone = create("MDC-tiny-quickgelu", tmp_path / "clip")
    assert_gives(alone, expected, image)
    assert alone.visual.preprocess_cfg["mean"] == [0.1, 0.2, 0.3]


@torch.no_grad()
@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("file_names", [True, False])
def test_dinov2_of_transformers(tmp_path, registers, file_names):
    """By the names of its files and by those of its modules, with registers and another size of images."""
    sizes = dict(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=70, patch_size=14)
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    config = getattr(transformers, f"{kind}Config")(**sizes, **({"num_register_tokens": 4} if registers else {}))
    model = random(getattr(transformers, f"{kind}Model")(config))
    model.save_pretrained(tmp_path / "dino")
    if not file_names:
        save_file({name: x.contiguous() for name, x in model.state_dict().items()}, tmp_path / "dino/model.safetensors")
    name = f"MDC-small-timm-vit_small_patch14{'_reg4' if registers else ''}_dinov2"
    for side in (70, 98):
        image = images(1, side)
        tokens = model(image).last_hidden_state[:, 1 + registers:]
        assert_gives(create(name, tmp_path / "dino", force_image_size=side), tokens, image)
    if not registers:
        config = open_clip.get_model_config("tiny-dino")
        config["vision_cfg"] |= {"width": 384, "layers": 12, "head_width": 64, "patch_size": 14, "image_size": 98}
        open_clip.factory._MODEL_CONFIGS["native-dino"] = config
        assert_gives(create("MDC-native-dino", tmp_path / "dino"), tokens, image)


@torch.no_grad()
def test_siglip_of_transformers_goes_into_timms(tmp_path):
    """Its pooling is left out. transformers has another GELU, which differs from timm's by 5e-4 at most."""
    sizes = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, image_size=64, patch_size=16,
                 intermediate_size=3072)
    model = random(transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, hidden_act="gelu")))
    model.save_pretrained(tmp_path / "siglip")
    image = images(1, 64)
    captioner = create("MDC-small-timm-vit_base_patch16_siglip_224", tmp_path / "siglip", force_image_size=64)
    assert_gives(captioner, model(image).last_hidden_state, image)
    assert captioner.visual.preprocess_cfg["mean"] == [0.5, 0.5, 0.5]


@torch.no_grad()
def test_a_run_and_an_export_of_ours(tmp_path):
    run = run_folder(tmp_path / "run", "MDC-ViT-Ti-8", image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.25, 0.3])
    trained = open_clip_mdc.load(run, device="cpu").model
    image = images(2, 32)
    expected = trained.encode_image_tokens(image)
    run_tool(["export", "--pretrained", str(run), "--out", str(tmp_path / "out")])
    for source in (run, checkpoint(tmp_path, 1), tmp_path / "out", f"local-dir:{tmp_path / 'out'}",
                   tmp_path / "out/model.safetensors", tmp_path / "out/clip_vision_model"):
        model = create("ARC-ViT-Ti-8", source)
        assert_gives(model, expected, image)
        assert model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]


def test_what_does_not_fit_is_one_line_that_names_the_first_difference(tmp_path):
    clip, path = open_clip.create_model("tiny-wide"), tmp_path / "w.pt"
    for name, state, words in (
            ("MDC-tiny", clip.state_dict(), "is [64], here [32]"),
            ("MDC-tiny", timm.create_model("test_resnet", num_classes=0).state_dict(), "it lacks class_embedding and"),
            ("MDC-tiny-wide", {**clip.visual.state_dict(), "register": torch.ones(1)}, "it has too much register. "),
            ("MDC-tiny-wide", {key: x for key, x in clip.state_dict().items() if not key.startswith("visual.ln_post")},
             "it lacks ln_post.weight and 1 more")):
        torch.save(state, path)
        said = refused(ValueError, create, name, path)
        assert words in said and said.endswith(". Give weights of the same encoder")
        assert said.startswith(f"--pretrained-image {path} does not fit the image tower of {name}: ")


def test_an_encoder_that_computes_another_thing_with_the_same_weights_is_refused(tmp_path):
    for options, said in (({}, "its activation is quick_gelu, here gelu"), (
            {"hidden_act": "gelu", "num_attention_heads": 4}, "its heads is 4, here 2"), (
            {"hidden_act": "gelu", "layer_norm_eps": 1e-3}, "its eps of LayerNorm is 0.001, here 1e-05")):
        config = transformers.CLIPVisionConfig(**SIZES | options)
        transformers.CLIPVisionModel(config).save_pretrained(tmp_path / "clip")
        assert said in refused(ValueError, create, "MDC-tiny", tmp_path / "clip")


def test_a_bare_flag_means_timms_own_weights_and_is_refused_for_other_towers(monkeypatch):
    assert "--pretrained-image needs a SOURCE" in refused(ValueError, create, "MDC-tiny", True)
    model, asked = random(timm.create_model("test_vit")), []
    real = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False, **options: (
        asked.append(name) or model) if pretrained else real(name, **options))
    image = images(1, 32)
    for source in (True, "timm:test_vit"):
        captioner = create("MDC-tiny-timm", source)
        assert captioner.visual.preprocess_cfg["mean"] == list(model.pretrained_cfg["mean"])
        assert torch.equal(captioner.visual.trunk.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)
        assert captioner.encode_image_tokens(image).shape == (1, 4, 64)
    assert asked == ["test_vit", "test_vit"]


def test_a_run_from_a_clip_model_starts_at_its_tower_and_remembers_mean_and_std(tmp_path):
    """The real command. With --lock-image and a learning rate of 0 for nobody, the tower stays the source's."""
    file = export(tmp_path / "clip", "ViT-Ti-8")
    folder, source = file.parent, torch.load(file, weights_only=True)
    flags = "--dataset-type synthetic --train-num-samples 8 --batch-size 4 --epochs 1"
    shown = open_clip_train(flags, "--pretrained-image", folder, "--lock-image --warmup 9", logs=tmp_path).stderr
    assert f"The image tower has the weights of {folder}" in shown
    assert "--warmup 9 is longer than this run of 2 steps" in shown
    assert "meta parameter" not in shown  # torch warns of each weight that is loaded into nothing
    trained = weights(tmp_path, 1)
    del source["visual.proj"]
    assert holds(trained, tower(source))
    assert open_clip_mdc.load(tmp_path / "run", device="cpu").model.visual.preprocess_cfg["mean"] == [0.4, 0.5, 0.6]
