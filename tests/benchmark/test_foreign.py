"""Claims about captioners of other projects: a score is their own loss, and the beam finds the best caption."""
import json
from itertools import product
from pathlib import Path

import models
import numpy as np
import open_clip
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from captioned import captioned
from conftest import complaint_of, made_images, png, read_json, refused, seeded
from models import WORDS, known, labelled_webdataset, order_data
from open_clip.coca_model import CoCa
from safetensors.torch import load_file, save_file

from clip_benchmark_ext import foreign
from clip_benchmark_ext.selection_datasets import build_dataset
from open_clip_mdc.data.captions import CAPTION_SEPARATOR
from open_clip_mdc.data.images import decode_image
from open_clip_mdc.data.shards import tar_writer
from open_clip_mdc.decoding.generate import generate
from open_clip_mdc.integration.checkpoints import load
from open_clip_mdc.likelihood.log_likelihood import log_likelihood, mean_image
from open_clip_mdc.models.foreign.coca import CoCaCaptioner
from open_clip_mdc.text.special_tokens import caption_lengths

pytestmark = pytest.mark.usefixtures("clip_benchmark")
VOCAB, CONTEXT = 7, 5


def coca_config(size: int, context_length: int, vocab_size: int) -> dict:
    tower = dict(context_length=context_length, vocab_size=vocab_size, width=size, heads=2, layers=1)
    return dict(embed_dim=size, multimodal_cfg=dict(**tower, attn_pooler_heads=2),
                text_cfg=dict(**tower, embed_cls=True, output_tokens=True),
                vision_cfg=dict(image_size=size, layers=1, width=size, patch_size=8, head_width=size // 2,
                                attentional_pool=True, attn_pooler_heads=2, output_tokens=True))


def tiny_coca() -> CoCa:
    torch.manual_seed(0)
    model = CoCa(**coca_config(16, CONTEXT, VOCAB))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


@torch.no_grad()
def most_likely(model: CoCa, image: torch.Tensor) -> list[int]:
    """By scoring every caption there is, with CoCa's own teacher forcing."""
    *words, sot, eot = range(VOCAB)
    scores = {}
    for count in range(CONTEXT - 1):
        for caption in product(words, repeat=count):
            text = torch.tensor([[sot, *caption, eot]])
            out = model(image[None], text)
            log_probs = out["logits"][:, :len(caption) + 1].log_softmax(-1)  # 4.x has one more, after EOT
            scores[caption] = float(log_probs.gather(2, text[:, 1:, None]).sum())
    return [sot, *max(scores, key=scores.get), eot]


def test_a_wide_beam_finds_the_most_likely_caption_of_all():
    model = tiny_coca()
    images = torch.randn(4, 3, 16, 16, generator=seeded(1)) * 3
    text = generate(CoCaCaptioner(model), images, num_beams=VOCAB ** 3)
    for row, image in zip(text.tolist(), images, strict=True):
        expected = most_likely(model, image)
        assert row[:len(expected)] == expected
    assert generate(CoCaCaptioner(model), images[:1], length=1, num_beams=4).shape[1] <= 3


CAPTIONS = ["a red star", "a blue circle and a green square", "two stars"]
SIDE = 32


def save_coca(folder: Path) -> tuple[str, str]:
    """A CoCa that OpenCLIP knows: what --model and --pretrained take."""
    name, weights = known(folder, "coca-tiny", coca_config(SIDE, 20, 49408) | {"custom_text": True})
    model = open_clip.create_model(name)
    torch.nn.init.normal_(model.text_decoder.text_projection, std=0.3)  # uninitialised upstream
    torch.nn.init.normal_(model.text.text_projection, std=0.3)
    torch.nn.init.normal_(model.visual.proj, std=0.3)
    torch.save(model.state_dict(), weights)
    return name, weights


def save_genlip(folder: Path) -> tuple[str, str]:
    """A GenLIP with CLIP's tokenizer, as the vocabulary of its own is a download."""
    if "naflexgenlip_test" not in open_clip.list_models():
        pytest.skip("OpenCLIP 3.3 has no GenLIP")
    text = dict(context_length=20, vocab_size=49408, pad_id=0, bos_id=49406, eos_id=49407)
    name, weights = known(folder, "genlip-tiny", open_clip.get_model_config("naflexgenlip_test") | {"text_cfg": text})
    torch.save(open_clip.create_model(name).state_dict(), weights)
    return name, weights


def save_hf(folder: Path, kind: str) -> Path:
    """Write a random captioner of transformers with a vocabulary of words, and processors."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[DEC]", "a", "and", "two", "stars", *WORDS]
    text = dict(vocab_size=len(words) + 3, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=64, max_position_embeddings=24, pad_token_id=0)
    image = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, image_size=SIDE,
                 patch_size=8)
    torch.manual_seed(0)
    if kind == "blip":
        model = transformers.BlipForConditionalGeneration(transformers.BlipConfig(
            text_config=dict(**text, encoder_hidden_size=24, bos_token_id=4, sep_token_id=3, is_decoder=True,
                             hidden_dropout_prob=0.0),
            vision_config=image, image_text_hidden_size=24))
    elif kind == "git":
        model = transformers.GitForCausalLM(transformers.GitConfig(
            **text, vision_config=image, bos_token_id=2, eos_token_id=3))
    else:
        decoder = transformers.GPT2Config(vocab_size=text["vocab_size"], n_embd=32, n_layer=2, n_head=2, n_positions=24,
                                          add_cross_attention=True, is_decoder=True, bos_token_id=3, eos_token_id=3)
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**image), decoder, decoder_start_token_id=3, pad_token_id=3, eos_token_id=3)
        model = transformers.VisionEncoderDecoderModel(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]",
                                         cls_token="[CLS]", sep_token="[SEP]").save_pretrained(folder)
    transformers.ViTImageProcessor(size=dict(height=SIDE, width=SIDE)).save_pretrained(folder)
    return folder


def own_loss(kind: str, image: torch.Tensor, ids: torch.Tensor, model) -> float:
    """The model's own summed cross-entropy of one caption's own ids [1, L], from SOT to EOT."""
    count = ids.shape[1] - 1
    if kind == "coca":
        out = model(image, ids)
        return float(F.cross_entropy(out["logits"][0, :count], ids[0, 1:], reduction="sum"))
    if kind == "genlip":
        from timm.data.naflex_transforms import patchify_image
        patches, place, valid = patchify_image(image[0], model.visual.patch_size)
        given = {"patches": patches[None], "patch_coord": place[None], "patch_valid": valid[None]}
        first = F.cross_entropy(model(given, ids)["logits"][0, len(patches) - 1, None], ids[0, :1])
        return (count + 1) * float(model(given, ids, compute_loss=True)["loss"]) - float(first)  # it also predicts SOT
    if kind == "vision-encoder-decoder":
        return count * float(model(pixel_values=image, labels=ids[:, 1:]).loss)
    return count * float(model(pixel_values=image, input_ids=ids, labels=ids).loss)


def flags_of(kind: str, folder: Path) -> tuple[str, ...]:
    if kind not in ("coca", "genlip"):
        return "--model", f"hf:{save_hf(folder / kind, kind)}"
    name, weights = save_coca(folder) if kind == "coca" else save_genlip(folder)
    return "--model", name, "--pretrained", weights, *(("--scorer autoregressive",) if kind == "coca" else ())


def evaluate(data, dataset, task, *flags) -> dict:
    """Under autocast, as by default."""
    return models.evaluate("--dataset", dataset, "--dataset_root", data, "--task", task, *flags)["metrics"]


def opened(flags):
    if flags[1].startswith("hf:"):
        return foreign.load_hf(flags[1], "cpu")
    model, transform, tokenizer = load(flags[3], flags[1])
    model, tokenizer = foreign.as_captioner(model, tokenizer, flags[1])
    return model, transform, tokenizer


@pytest.mark.parametrize("kind", ["coca", "vision-encoder-decoder", "blip", "git", "genlip"])
@torch.no_grad()
def test_a_score_is_the_models_own_cross_entropy(kind, tmp_path):
    flags = flags_of(kind, tmp_path)
    model, transform, tokenizer = opened(flags)
    if kind in ("coca", "genlip"):
        own = load(flags[3], flags[1])[0]
    else:
        from transformers import AutoModelForImageTextToText
        own = AutoModelForImageTextToText.from_pretrained(tmp_path / kind).eval()
    images = made_images(transform, 2)
    text = tokenizer(CAPTIONS)  # padded to the longest
    lengths = caption_lengths(text, model.vocab_size).tolist()
    assert len({*lengths}) == 3
    found = log_likelihood(model, images, text.expand(2, -1, -1))
    for i, c in product(range(2), range(3)):
        ids = text[c, :lengths[c]].clone()
        if model.ends:
            ids[0], ids[-1] = model.ends
        expected = -own_loss(kind, images[i:i + 1], ids[None], own)
        assert float(found[i, c]) == pytest.approx(expected, rel=1e-5)
    assert (found[0] - found[1]).abs().min() > 1e-3  # images matter
    # The null image is the mean of what the decoder reads, and one caption alone scores as it does among others.
    blind = mean_image(model, [images])
    assert blind.shape == model.encode(images).shape[1:]
    prior = log_likelihood(model, None, text[None], blind=blind)[0]
    alone = [float(log_likelihood(model, None, row[None], blind=blind)) for row in text]
    assert prior.tolist() == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("kind", ["coca", "git", "genlip"])
def test_a_selection_is_plain_blind_and_debiased_and_coca_stays_by_cosine_unless_asked(kind, tmp_path):
    flags, data = flags_of(kind, tmp_path), order_data(tmp_path)
    found = evaluate(data, "aro/coco_order", "image_caption_selection", *flags, "--alpha 0.5")
    assert all(0 <= found[f"text_acc{suffix}"] <= 1 for suffix in ("", "_blind", "_debiased"))
    assert (found["scorer"], found["alpha"], found["blind"]) == ("autoregressive", 0.5, "mean image")
    if kind == "coca":
        plainly = evaluate(data, "aro/coco_order", "image_caption_selection", *flags[:4])
        assert plainly["scorer"] == "cosine" and "text_acc_blind" not in plainly


@pytest.mark.parametrize("kind", ["coca", "git", "genlip"])
def test_pairs_get_the_scores_that_a_selection_compares(kind, tmp_path):
    """By another command, with its own reader, batches and null image. Its bf16 is the autocast of the selection."""
    flags, data = flags_of(kind, tmp_path), order_data(tmp_path, images=40)
    selected = evaluate(data, "aro/coco_order", "image_caption_selection", *flags, "--alpha 0.5")
    model, transform, tokenizer = opened(flags)
    cases = build_dataset("aro/coco_order", data, transform)
    with tar_writer(tmp_path / "pairs.tar") as writer:
        for i, (_, captions) in enumerate(cases):
            writer.write({"__key__": f"{i:02d}", "png": png(i), "txt": CAPTION_SEPARATOR.join(captions)})
    argv = ("score", *flags[:4], "--pairs", tmp_path / "pairs.tar", "--alpha 0.5 --workers 0")
    assert complaint_of(*argv, "--precision bf16 --out", tmp_path / "scores") is None
    table = pd.read_parquet(tmp_path / "scores/pairs.parquet")
    score, blind, debiased = (table[name].to_numpy().reshape(40, 5) for name in ("score", "blind", "debiased"))
    for suffix, scores in (("", score), ("_blind", blind), ("_debiased", debiased)):
        assert selected[f"text_acc{suffix}"] == pytest.approx(np.mean(scores.argmax(1) == 0))
    assert np.allclose(debiased, score - 0.5 * blind, atol=1e-4) and len({*np.ravel(score)}) > 60
    image, captions = cases[3]
    with torch.autocast("cpu"):
        own = log_likelihood(model, image[None], tokenizer(captions)[None])
    assert score[3] == pytest.approx(own[0].numpy(), abs=1e-2)
    assert table["num_tokens"][15:20].tolist() == [len(tokenizer.encode(caption)) + 1 for caption in captions]
    # A caption of all images, in a file.
    Path("captions.txt").write_text("\n".join(CAPTIONS))
    assert complaint_of("score", *flags[:4], "--images", data / "val2014",
                        "--captions captions.txt --out all.csv --workers 0") is None
    rows = pd.read_csv("all.csv")
    assert len(rows) == 120 and {token["token"] for token in json.loads(rows["tokens"][0])} > {"<end>"}
    image = transform(decode_image(data / "val2014/0.png"))
    assert rows["score"][:3].tolist() == pytest.approx(
        log_likelihood(model, image[None], tokenizer(CAPTIONS)[None])[0].tolist(), rel=1e-4)


@pytest.mark.parametrize("kind", ["coca", "git"])
def test_the_other_tasks_score_and_caption_too(kind, tmp_path):
    flags, captions = flags_of(kind, tmp_path), captioned(tmp_path)
    classes = labelled_webdataset(tmp_path / "classes", WORDS[:4], ["a {c} star"], per_split=8)
    zero_shot = evaluate(classes, "wds/x", "zeroshot_classification", *flags)
    model, transform, tokenizer = opened(flags)
    images = made_images(transform, 8)
    text = tokenizer([f"a {word} star" for word in WORDS[:4]])
    with torch.autocast("cpu"):
        plain = log_likelihood(model, images, text.expand(8, -1, -1))
    assert zero_shot["acc1"] == pytest.approx(float((plain.argmax(1) == torch.arange(8) % 4).float().mean()))
    assert zero_shot["scorer"] == "autoregressive" and 0 <= zero_shot["acc1_debiased"] <= 1
    retrieval = evaluate(captions, "wds/x", "zeroshot_retrieval", *flags, "--recall_k 1 3")
    assert retrieval["pairs"] == retrieval["images"] * retrieval["captions"] and retrieval["text_retrieval_recall@3"]
    cloze = evaluate(captions, "wds/x", "cloze", *flags[:4])
    assert cloze["questions_colour"] and 0 <= cloze["choice_acc_colour_debiased"] <= 1
    assert "cloze_acc" not in cloze  # it reads from left to right
    written = evaluate(captions, "wds/x", "captioning", *flags[:4], "--caption_length 4 --samples 2 --temperature 1")
    saved = read_json("captions/result.json")
    assert all(map(str.strip, saved["captions"].values())) and 0 < written["mean_tokens"] <= 4
    assert all(len(samples) == 2 for samples in saved["samples"].values())


def test_what_cannot_be_scored_is_refused_in_a_line(tmp_path):
    transformers = pytest.importorskip("transformers")
    data = order_data(tmp_path)

    def why(*flags) -> str:
        return refused(SystemExit, evaluate, data, "aro/coco_order", "image_caption_selection", *flags)

    for scorer in ("heuristic", "cosine"):
        assert f"--scorer {scorer} does not fit" in why(*flags_of("git", tmp_path), "--scorer", scorer)
    with pytest.raises(SystemExit, match="--task linear_probe is not for --model hf:"):
        evaluate(captioned(tmp_path), "wds/x", "linear_probe", *flags_of("git", tmp_path))
    folder = tmp_path / "model"
    transformers.ViTConfig().save_pretrained(folder)
    assert "it is a vit, and not a vision-encoder-decoder, blip, git" in why("--model", f"hf:{folder}")
    save_hf(folder, "blip")
    (folder / "model.safetensors").rename(tmp_path / "kept")
    torch.save({}, folder / "pytorch_model.bin")
    assert "safetensors" in why("--model", f"hf:{folder}")
    weights = load_file(tmp_path / "kept")
    name = next(name for name in weights if "crossattention" in name)
    del weights[name]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert f"its weights lack {name}" in why("--model", f"hf:{folder}")
