"""Claims about model configs by name."""
from pathlib import Path

import open_clip
import pytest
from conftest import read_json

import open_clip_mdc
from open_clip_mdc.integration import configs

OLD = read_json(Path(__file__).parent / "fixtures/configs_0.1.json")  # the rows of the paper
PREFIXES = ("MDC-", "ARC-", "CapPa-")


@pytest.fixture(autouse=True)
def registered():
    open_clip_mdc.register()


@pytest.mark.parametrize("name", OLD)
def test_a_name_of_version_0_1_means_what_it_meant(name):
    assert open_clip.get_model_config(name) == OLD[name]
    assert name in open_clip.list_models() and open_clip_mdc.is_captioner(name)


def test_every_base_of_openclip_is_a_captioner():
    for base in open_clip.list_models():
        known = open_clip.get_model_config(base)
        if "caption_cfg" in known or not configs.has_image_tower(known):
            assert open_clip.get_model_config("MDC-" + base) is None
            continue
        for prefix in PREFIXES:
            config = open_clip.get_model_config(prefix + base)
            assert open_clip_mdc.is_captioner(prefix + base)
            assert config["vision_cfg"] == open_clip.get_model_config(base)["vision_cfg"]
            text = config["text_cfg"]
            assert text["vocab_size"] == 49408 or "bpe_path" in text["tokenizer_kwargs"]


def test_a_base_of_timm_is_any_encoder_of_timm_at_its_own_size():
    config = open_clip.get_model_config("ARC-timm-tf_efficientnet_lite0")
    assert config["vision_cfg"] == {"timm_model_name": "tf_efficientnet_lite0", "image_size": 224}
    assert config["text_cfg"] == configs.PAPER_DECODER and open_clip_mdc.is_captioner("ARC-timm-tf_efficientnet_lite0")
    assert open_clip.get_model_config("MDC-timm-vit_small_patch14_dinov2")["vision_cfg"]["image_size"] == 518
    assert open_clip.get_model_config("MDC-timm-nosuch") is None


@pytest.mark.parametrize("base", ["ViT-B-16-plus-240", "ViT-S-32-alt", "ViT-B-16-SigLIP", "ViT-H-14-CLIPA", "coca_base",
                                  "xlm-roberta-base-ViT-B-32", "PE-Core-T-16-384"])
def test_the_decoder_has_the_size_of_the_base_text_tower_or_the_papers(base):
    ours = open_clip.get_model_config("MDC-" + base)["text_cfg"]
    text = open_clip.get_model_config(base)["text_cfg"]
    of_its_own = base in ("ViT-B-16-plus-240", "ViT-S-32-alt", "PE-Core-T-16-384")
    assert ours == ({k: text[k] for k in ours} if of_its_own else configs.PAPER_DECODER)
    assert {"width", "heads", "layers", "vocab_size"} <= ours.keys()


@pytest.mark.parametrize("name", ["MDC-ViT-SO400M-14-SigLIP", "ARC-ViT-B-16-SigLIP2-256", "MDC-ViT-B-32-SigLIP2-256"])
def test_a_captioner_with_siglip_in_its_name_reads_clips_bpe(name):
    """Upstream's get_tokenizer would give it SigLIP's vocabulary, whatever its config says."""
    for tokenizer in (open_clip.get_tokenizer(name), open_clip_mdc.get_tokenizer(name)):
        assert isinstance(tokenizer, open_clip.tokenizer.SimpleTokenizer)
        assert tokenizer(["a red circle"]).equal(open_clip.get_tokenizer("ViT-B-32")(["a red circle"]))
    assert open_clip.get_tokenizer(name, context_length=20)(["a dog"]).shape == (1, 20)


def test_unknown_names_stay_unknown():
    for name in ("MDC-", "MDC-ViT-B-3", "MDC-MDC-ViT-B-32", "XYZ-ViT-B-32", "BERT-ViT-B-3-r50", "MDC-ViT-B-32-t0.5",
                 "BERT-ViT-B-32-rr", "MDC-ViT-B-3-t0.8-0.2", "ARC-ViT-B-32-t0.25-0.75"):
        assert open_clip.get_model_config(name) is None and not open_clip_mdc.is_captioner(name)


def test_any_interval_of_t_and_any_bert_ratio_is_a_name():
    """Which differs from the table's rows in nothing else, and is theirs where they have it."""
    for name, like, low, high in (
            ("MDC-ViT-B-32-t0.25-0.75", "MDC-ViT-B-32-t0.3-0.8", 0.25, 0.75),
            ("MDC-ViT-SO400M-14-SigLIP-t0.2-1.0", "MDC-ViT-SO400M-14-SigLIP", 0.2, 1.0),
            ("MDC-ViT-B-32-t0.30-0.80", "MDC-ViT-B-32-t0.3-0.8", 0.3, 0.8),
            ("BERT-ViT-B/32-r50", "BERT-ViT-B-32-r15", 0.5, 0.5),
            ("BERT-ViT-Ti-8-r7.5", "BERT-ViT-Ti-8-r15", 0.075, 0.075),
            ("BERT-ViT-Ti-8-r100", "Parallel-ViT-Ti-8", 1.0, 1.0),
            ("BERT-ViT-Ti-8-r45", "BERT-ViT-Ti-8-r45", 0.45, 0.45)):
        expected = open_clip.get_model_config(like)
        expected["caption_cfg"] |= dict(t_min=low, t_max=high)
        assert open_clip.get_model_config(name) == expected and open_clip_mdc.is_captioner(name)
    assert open_clip.create_model("MDC-ViT-Ti-8-t0.25-0.75").caption_cfg.t_min == 0.25


@pytest.mark.parametrize("name, interval, expected", [
    ("MDC-ViT-Ti-8", (0.2, 0.7), "MDC-ViT-Ti-8-t0.2-0.7"), ("MDC-ViT-B-32-t0.0-1.0", (0.5, 1.0), "MDC-ViT-B-32"),
    ("BERT-ViT-Ti-8-r30", (0.3, 0.8), "MDC-ViT-Ti-8-t0.3-0.8"), ("MDC-ViT-B-16-SigLIP-t0.25-0.75", (0.1, 0.6),
                                                                 "MDC-ViT-B-16-SigLIP-t0.1-0.6")])
def test_an_intervals_name_is_that_of_a_model_that_has_it(name, interval, expected):
    assert configs.interval_name(name, *interval, open_clip.get_model_config) == expected
    cfg = open_clip.get_model_config(expected)["caption_cfg"]
    assert (cfg["t_min"], cfg["t_max"]) == interval
