"""Claims about `clip_benchmark eval --task probe`."""
import math
from argparse import Namespace
from pathlib import Path

import models
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import read_json
from models import labelled_webdataset, save_clip
from safetensors.torch import save_file

import open_clip_mdc
from clip_benchmark_ext import towers
from clip_benchmark_ext.table import markdown, read_results
from clip_benchmark_ext.tasks import heads, knn, probe
from open_clip_mdc.integration import checkpoints
from open_clip_mdc.models.towers import patch_tokens, tower


def test_votes_of_neighbours_are_those_of_a_loop(monkeypatch):
    monkeypatch.setattr(knn, "KS", (1, 10, 20, 100))
    monkeypatch.setattr(knn, "COSINES", 90)  # three test images at once
    torch.manual_seed(0)
    train, test, labels = torch.randn(30, 5), torch.randn(7, 5), torch.randint(0, 4, (30,))
    votes = knn.knn_votes(train, labels, test, 4)
    assert votes.keys() == {"knn1", "knn10", "knn20"}  # there are 30 training images
    for k in (1, 10, 20):
        for x, found in zip(test, votes[f"knn{k}"].tolist(), strict=True):
            cosines = sorted(((float(x @ y / x.norm() / y.norm()), int(label))
                              for y, label in zip(train, labels, strict=True)), reverse=True)
            expected = [0.0] * 4
            for cosine, label in cosines[:k]:
                expected[label] += math.exp(cosine / 0.07)
            assert found == pytest.approx(expected, rel=1e-4)


def test_the_attentive_probe_is_multi_head_attention_of_one_query():
    torch.manual_seed(0)
    tokens = torch.randn(3, 6, 128) * 2 + 1
    mean, std = heads.moments(iter(tokens.split(2)))
    torch.testing.assert_close(mean, tokens.flatten(0, 1).mean(0))
    torch.testing.assert_close(std, tokens.flatten(0, 1).std(0, unbiased=False))
    head = heads.AttentiveProbe(mean, std, 5)
    assert head.heads == 2
    torch.nn.init.normal_(head.query)
    x = F.layer_norm(tokens.flatten(0, 1).T, (18,)).T.unflatten(0, (3, 6))  # standardised over images and places
    reference = torch.nn.MultiheadAttention(128, 2, bias=False, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat((torch.eye(128), head.key.weight, head.value.weight)))
        reference.out_proj.weight.copy_(torch.eye(128))
        seen = reference(head.query.expand(3, 1, 128), x, x)[0][:, 0]
        torch.testing.assert_close(head(tokens), head.classifier(seen), atol=1e-4, rtol=1e-4)


def marked(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of which one, at a random place, has a mark and the class.

    An unmarked token has the opposite class.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = 0.1 * torch.randn(count, 9, 16, generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    for image, label in zip(tokens, labels.tolist(), strict=True):
        here, there = torch.randperm(9, generator=generator)[:2].tolist()
        image[here, 0], image[there, 0] = 2, 0
        image[here, 1], image[there, 1] = (2 * label - 1) * torch.tensor([2, -2])
    return tokens, labels


def test_attention_finds_what_the_mean_over_patches_has_lost():
    (tokens, labels), (test, targets) = marked(400, 0), marked(200, 1)
    torch.manual_seed(0)
    attentive = heads.AttentiveProbe(*heads.moments([tokens]), 2)
    heads.train(attentive, torch.arange(400), lambda head, rows: F.cross_entropy(head(tokens[rows]), labels[rows]),
                3e-3, 0.1, 20, 32, 0, "test")
    assert attentive(test).argmax(1).eq(targets).float().mean() > 0.95
    data = {"train": (tokens.mean(1), labels), "test": (test.mean(1), targets)}
    args = Namespace(batch_size=32, fewshot_lr=0.1, fewshot_epochs=20, seed=0, device="cpu", amp=False)
    assert probe.probe_features(data, args)[1]["lp_acc1"] < 0.65


@torch.no_grad()
@pytest.mark.parametrize("vision", [
    dict(image_size=32, patch_size=8, width=64, head_width=32, layers=3),
    dict(timm_model_name="test_vit", image_size=160), dict(timm_model_name="test_convnext", image_size=64),
], ids=["native", "timm's ViT", "feature maps"])
def test_the_sweep_is_a_forward_pass_of_its_own_for_each_layer(vision):
    torch.manual_seed(0)
    visual = towers.build({"vision_cfg": vision}, None, False)
    image = torch.randn(2, 3, vision["image_size"], vision["image_size"])
    job = Namespace(model=Namespace(trained=visual, untrained=visual))
    found = probe.encode_fn(job, "gap")(image)
    layers = [x for name, x in found.items() if name.startswith("layer.")]
    torch.testing.assert_close(layers[-1], patch_tokens(visual, image).mean(1))
    torch.testing.assert_close(found["tokens"].float(), patch_tokens(visual, image), atol=2e-3, rtol=1e-3)
    if "convnext" in str(vision):  # with hooks on timm's stages
        maps = []
        hooks = [stage.register_forward_hook(lambda _, __, x: maps.append(x)) for stage in visual.trunk.stages]
        visual.trunk(image)
        assert len(hooks) == len(maps) == len(layers) - 1
        expected = [F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],)).mean((1, 2)) for x in maps]
    else:
        expected = [tower(visual).features(image, "gap", layer) for layer in range(tower(visual).num_layers - 1)]
        cls = probe.encode_fn(job, "cls")(image)
        torch.testing.assert_close(cls["layer.1"], tower(visual).features(image, "cls", 0))
    assert len(expected) == len(layers) - 1 >= 2
    for layer, own in zip(layers, expected, strict=False):
        torch.testing.assert_close(layer, own)


def evaluate(runs: Path, data: Path, *flags, name: str = "result") -> dict:
    return models.evaluate(*models.flags_of(runs, "wds/x", data, "--task probe --no_amp --batch_size 10",
                                            *flags), name=name)["metrics"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return labelled_webdataset(tmp_path_factory.mktemp("labelled"), ["red", "blue", "green"], ["a {c}"])


@pytest.fixture
def seen(monkeypatch):
    """Count the images that went through the first layer of the trained and of the untrained tower."""
    counts = {"trained": 0, "untrained": 0}
    load = towers.load

    def counted(*args):
        found = load(*args)
        for name in counts:
            def count(module, inputs, output, name=name):
                counts[name] += len(inputs[0])
            getattr(found, name).conv1.register_forward_hook(count)
        return found
    monkeypatch.setattr(towers, "load", counted)
    return counts


@pytest.mark.usefixtures("clip_benchmark")
def test_a_captioner_beside_its_floors_with_each_image_encoded_once(runs, data, seen):
    flags = (runs, data, "--fewshot_epochs 2")
    metrics = evaluate(*flags)
    assert seen == {"trained": 48, "untrained": 48}
    assert metrics["layers"] == 4 and metrics["held_out"] == 2 and metrics["feature"] == "gap"
    for row in ("", "layer_1/", "layer_2/", "layer_3/", "untrained/", "pixels/"):
        for one in ("knn10", "knn20", "linear", *(["attentive"] if row in ("", "untrained/") else [])):
            share = metrics[f"{row}{one}_acc1"]
            assert metrics[f"{row}{one}_se"] == pytest.approx(math.sqrt(share * (1 - share) / 24))
            assert metrics[f"{row}{one}_macro"] == pytest.approx(share)  # classes have as many images
    items = read_json("items/result.json")["values"]
    assert sum(items["untrained/linear_acc1"]) == round(24 * metrics["untrained/linear_acc1"])
    head, _, *rows = markdown(read_results(["result.json"])).splitlines()
    assert head.startswith("| data set | model (run) | scorer | features | 10-NN | 20-NN | linear | linear, macro |")
    assert [row.split(" | ")[3] for row in rows] == ["encoder", "layer 1", "layer 2", "layer 3", "untrained", "pixels"]
    assert f"| {100 * metrics['linear_acc1']:.1f} ± {100 * metrics['linear_se']:.1f} |" in rows[0]
    # All is there: nothing is encoded, and the numbers are the same. One file lacking is ten images.
    assert evaluate(*flags, name="again") == metrics
    assert seen == {"trained": 48, "untrained": 48}
    (next(Path("features").glob("train-tokens-*")) / "00000001.safetensors").unlink()
    assert evaluate(*flags, name="mended") == metrics
    assert seen == {"trained": 58, "untrained": 58}


@pytest.mark.usefixtures("clip_benchmark")
def test_nothing_is_chosen_by_test_images(runs, data, monkeypatch):
    """With other test labels the choices, and what is predicted, are the same."""
    flags = (runs, data, "--fewshot_epochs 2 --val_proportion 0.4")
    first = evaluate(*flags)
    column = probe.TokenCache.column

    def other(self, name):
        found = column(self, name)
        return (found + 1) % 3 if name == "targets" and "test-tokens" in str(self.files[0]) else found
    monkeypatch.setattr(probe.TokenCache, "column", other)
    second = evaluate(*flags)
    chosen = [name for name in first if name.endswith(("weight_decay", "learning_rate"))]
    assert len(chosen) == 8 and all(first[name] == second[name] for name in chosen)
    assert first["held_out"] == 10 and first["linear_acc1"] + second["linear_acc1"] <= 1


@pytest.mark.usefixtures("clip_benchmark")
def test_a_clip_model_is_probed_by_its_class_token_before_the_projection(runs, data, tmp_path):
    name, weights = save_clip(tmp_path)
    metrics = evaluate(runs, data, "--model", name, "--pretrained", weights, "--fewshot_epochs 1")
    assert metrics["feature"] == "cls" and metrics["layers"] == 1
    model, _, _ = checkpoints.load(weights, name)
    found = towers.load(Namespace(model=name, pretrained=weights, model_type="open_clip", device="cpu", seed=0,
                                  skip_load=False), None)
    image = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(tower(found.trained).features(image, "cls") @ model.visual.proj,
                                   model.encode_image(image))


@pytest.mark.usefixtures("clip_benchmark")
def test_an_encoder_of_timm_at_another_size_and_an_untrained_one_by_its_seed(runs, data, tmp_path):
    torch.manual_seed(3)
    trunk = timm.create_model("test_vit", num_classes=7)
    save_file(trunk.state_dict(), tmp_path / "weights.safetensors")
    flags = ("--model timm-test_vit --pretrained", tmp_path / "weights.safetensors")
    assert evaluate(runs, data, *flags, "--image_size 32 --fewshot_epochs 1")["layers"] == 6
    args = Namespace(model="timm-test_vit", pretrained=str(tmp_path / "weights.safetensors"), device="cpu", seed=0)
    found = towers.load(args, None)
    image = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        expected = trunk.eval().forward_features(image)
        torch.testing.assert_close(patch_tokens(found.trained, image), expected[:, 1:])
        other = [patch_tokens(towers.load(args, None).untrained, image) for args.seed in (0, 1)]
        assert torch.equal(other[0], patch_tokens(found.untrained, image))
        assert not torch.allclose(other[0], other[1]) and not torch.allclose(other[0], expected[:, 1:])


@torch.no_grad()
@pytest.mark.usefixtures("clip_benchmark")
def test_an_encoder_of_transformers_is_probed_by_its_own_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    open_clip_mdc.register()
    torch.manual_seed(0)
    model = transformers.ViTModel(transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768))
    for weights in model.parameters():  # at its own start, of 0.02, its eps and timm's are told apart by 1e-3
        torch.nn.init.normal_(weights, std=0.2)
    model.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]).save_pretrained(tmp_path)
    found = towers.load(Namespace(model="timm-vit_tiny_patch16_224", pretrained=str(tmp_path), device="cpu", seed=0),
                        None)
    image = torch.randn(2, 3, 224, 224)
    expected = model.eval()(image).last_hidden_state
    torch.testing.assert_close(patch_tokens(found.trained, image), expected[:, 1:], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(tower(found.trained).features(image, "cls"), expected[:, 0], atol=1e-3, rtol=1e-3)
    assert found.preprocess.mean == [0.5, 0.4, 0.3] and found.preprocess.std == [0.2, 0.3, 0.4]
