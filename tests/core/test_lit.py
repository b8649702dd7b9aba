"""Claims about LiT models: a text tower learns to fit a captioner's image tower."""
import copy

import open_clip
import pytest
import torch
from benchmark.models import evaluate, save_clip
from conftest import images, json_lines, run_folder
from training import equal, open_clip_train, weights

import open_clip_mdc


@pytest.fixture(autouse=True)
def registered():
    open_clip_mdc.register()
    yield
    open_clip_mdc.unregister()


@pytest.fixture(scope="module")
def trained(scenes, tmp_path_factory):
    """A captioner, and LiT on its locked tower, whose tokens are computed once."""
    logs = tmp_path_factory.mktemp("lit")
    flags = "--dataset-type webdataset --batch-size 64 --lr 2e-3 --warmup 10 --workers 1"
    where = dict(data=scenes / "train/{00000..00007}.tar", logs=logs)
    open_clip_train(flags, "--epochs 3", name="captioner", **where)
    open_clip_train(flags, f"--epochs 6 --pretrained-image {logs}/captioner --lock-image --cache-features {logs}/cache "
                    f"--val-data {scenes}/val/00000.tar", name="lit", model="LiT-ViT-Ti-8", **where)
    return logs


def tower(logs, epoch: int, name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix("visual.").removeprefix("tower."): x for key, x in weights(logs, epoch, name).items()
            if key.startswith("visual.") and key != "visual.proj"}


def test_the_locked_tower_stays_bit_for_bit_and_cosines_classify(trained, scenes, clip_benchmark):
    """There are 16 classes, so chance is 6 %. The validation has 64 pairs."""
    assert equal(tower(trained, 3, "captioner"), tower(trained, 6, "lit"))
    rows = json_lines(trained / "lit/checkpoints/results.jsonl")
    assert rows[-1]["clip_val_loss"] < rows[0]["clip_val_loss"] and rows[-1]["image_to_text_R@10"] > 0.3
    result = evaluate("--model", "LiT-ViT-Ti-8", "--pretrained", trained / "lit", "--dataset", "wds/probe",
                      "--dataset_root", scenes / "probe", "--task", "zeroshot_classification", "--no_amp")
    assert result["metrics"]["acc1"] > 0.12


@pytest.mark.parametrize("base", ["ViT-Ti-8", "small-timm-test_vit", "small-timm-test_efficientnet", "tiny-clip-vit"])
def test_the_embedding_is_the_captioners_gap_feature_projected_and_only_the_tower_is_locked(base, tmp_path):
    save_clip(tmp_path, "tiny-clip-vit")
    source = run_folder(tmp_path / "run", f"MDC-{base}")
    model, _, _ = open_clip_mdc.create_model_and_transforms(f"LiT-{base}", pretrained_image=str(source))
    captioner = open_clip_mdc.load(source).model
    image = images(3, torch.tensor(captioner.visual.image_size).max())
    expected = captioner.encode_image(image) @ model.visual.proj
    for given in (image, captioner.encode_image_tokens(image)):
        torch.testing.assert_close(model.eval().encode_image(given), expected)

    model.lock_image_tower()
    before = copy.deepcopy(model.state_dict())
    text = open_clip.get_tokenizer(f"LiT-{base}")(["a dog", "a cat", "two dogs"])
    open_clip.ClipLoss()(*model.train()(image, text)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = model.state_dict()
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert {"visual.proj", "logit_scale", "text.token_embedding.weight"} <= changed
    assert not any(name.startswith("visual.tower.") for name in changed)


def test_names():
    config = open_clip.get_model_config("LiT-ViT-B/32")
    known = open_clip.get_model_config("ViT-B-32")
    assert {key: config[key] for key in known} == known and config["image_pool"] == "gap"
    assert open_clip.get_model_config("LiT-small-timm-test_vit")["text_cfg"]["width"] == 192
    for name in ("LiT-ViT-B-3", "LiT-MDC-ViT-B-32", "LiT-", "LiT"):
        assert open_clip.get_model_config(name) is None
    assert not open_clip_mdc.is_captioner("LiT-ViT-B-32")
