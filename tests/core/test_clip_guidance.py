"""Claims about a CLIP model that helps a captioner."""
import math
from pathlib import Path
from unittest.mock import Mock

import open_clip
import pytest
import torch
from conftest import seeded, with_opinions
from open_clip.tokenizer import SimpleTokenizer

from open_clip_mdc import register
from open_clip_mdc.decoding import clip_guidance
from open_clip_mdc.decoding.clip_guidance import Clip, Guide, encode_text
from open_clip_mdc.decoding.confidence import reweigh
from open_clip_mdc.decoding.generate import generate
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.integration import clip as clip_models
from open_clip_mdc.integration import configs
from open_clip_mdc.text.special_tokens import decode_captions

MODELS = ("MDC-ViT-Ti-8", "MCD-ViT-Ti-8")


def opinionated(name: str, seed: int = 1) -> torch.nn.Module:
    """A captioner or CLIP model of the scenes, untrained, that does not find all captions alike."""
    register()
    torch.manual_seed(seed)
    model = open_clip.create_model(name).eval()
    if not hasattr(model, "encode_text"):
        return with_opinions(model)
    for block in model.text.transformer.resblocks:
        torch.nn.init.normal_(block.mlp.c_proj.weight, std=0.5)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return SimpleTokenizer(bpe_path=str(Path(str(configs.FOLDER)) / "scenes_bpe.txt.gz"))


@pytest.fixture
def clip(tokenizer):
    """A CLIP model whose tokenizer remembers what it was given."""
    return Clip(opinionated("ViT-Ti-8", seed=5), None, Mock(side_effect=tokenizer))


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return opinionated(request.param)


def cosine(clip, image, caption, tokenizer) -> float:
    with torch.no_grad():
        return float(torch.cosine_similarity(clip.model.encode_image(image[None]),
                                             clip.model.encode_text(tokenizer([caption]))))


TEXT = dict(context_length=77, vocab_size=80, width=32, heads=2, layers=2)


@pytest.mark.parametrize("custom, text_cfg, positions", [
    (False, TEXT, 6), (True, TEXT, 6), (True, TEXT | dict(pool_type="eos", eos_id=79), 6),
    (True, TEXT | dict(pool_type="last"), 77), (True, TEXT | dict(no_causal_mask=True), 77),
    (True, TEXT | dict(embed_cls=True, context_length=76, pad_id=0), 77),
])
def test_texts_cost_their_own_positions_and_are_encoded_as_by_the_model(custom, text_cfg, positions):
    torch.manual_seed(0)
    vision = dict(image_size=32, patch_size=8, width=64, head_width=32, layers=1)
    clip = (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(32, vision, text_cfg).eval()
    text = torch.zeros(3, text_cfg["context_length"], dtype=torch.long)
    for row, n in enumerate((3, 6, 2)):
        text[row, :n] = torch.tensor([78, 5, 6, 7, 8, 79])[[*range(n - 1), -1]]
    expected, seen = clip.encode_text(text), []
    transformer = clip.text.transformer if custom else clip.transformer
    transformer.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    torch.testing.assert_close(encode_text(clip, text, "cpu"), expected, atol=1e-5, rtol=1e-4)
    assert seen == [positions] and (expected[0] - expected[1]).abs().max() > 0.01
    assert torch.equal(clip.encode_text(text), expected)  # its own tensors are in place again


@pytest.mark.parametrize("options", [dict(length=6), dict(length="auto"), dict(length=6, tokens_per_step=3), dict(
    length=6, samples=2)], ids=str)
def test_scale_0_and_one_candidate_are_plain_decoding_bit_for_bit_and_ask_clip_nothing(
        model, clip, image, tokenizer, options):
    def decode(guide):
        sampling = Sampling(1.0, generator=seeded(0)) if "samples" in options else Sampling()
        return generate(model, image, return_trace=True, guide=guide, sampling=sampling, **options)

    plain = decode(None)
    for scale, top_k in ((0.0, 5), (3.0, 1)):
        guide = Guide(clip, image, tokenizer, scale, top_k)
        assert all(map(torch.equal, plain, decode(guide))) and guide.texts == [0] * 5
    assert not clip.tokenizer.called
    guide = Guide(clip, image, tokenizer, 3.0, 5)
    assert not torch.equal(plain.text, decode(guide).text) and min(guide.texts) > 5


def test_a_step_multiplies_the_probabilities_of_the_candidates_by_clips_worked_out_by_hand():
    """Candidates 2 and 0 of .4 and .3 that CLIP finds e^-1 and e times as probable: .7 is shared by .4/e and .3 e."""
    filled = torch.tensor([[4, 2, 1, 5], [4, 2, 2, 5]])
    log_prob = torch.tensor([[0.3, 0.25, 0.4, 0.05, 0, 0]]).log()
    seen = []

    def guide(captions, row):
        seen.append((captions.tolist(), row.tolist()))
        return torch.tensor([[-1.0, 1.0]])

    weighed = reweigh(log_prob, filled, torch.tensor([6]), guide, 2)[0].exp().tolist()
    assert seen == [([[[4, 2, 2, 5], [4, 2, 0, 5]]], [1])]
    a, b = 0.4 / math.e, 0.3 * math.e
    assert weighed == pytest.approx([0.7 * b / (a + b), 0.25, 0.7 * a / (a + b), 0.05, 0, 0])
    assert sum(weighed) == pytest.approx(1)


def test_a_guide_that_says_nothing_changes_no_distribution_and_sees_no_impossible_token():
    """Ids 4 and 5, SOT and EOT, are impossible. Three ids are possible, where five are asked for."""
    log_prob = torch.tensor([[0.5, 0.3, 0.2, 0.0, 0, 0]]).log()

    def guide(captions, row):
        assert captions.shape[1] == 5 and captions[..., 1].max() <= 2
        return torch.zeros(captions.shape[:2])

    torch.testing.assert_close(reweigh(log_prob, torch.tensor([[4, 0, 5]]), torch.tensor([1]), guide, 5), log_prob)


def naive(model, clip, image, tokenizer, length, scale, top_k):
    """Guided decoding of one image in loops, everything computed anew at each step. Returns ids and their log p."""
    size = model.vocab_size
    mask, sot, eot = size, size - 2, size - 1
    ids, log_prob = [sot] + [mask] * length + [eot], [0.0] * (length + 2)
    while mask in ids:
        with torch.no_grad():
            log_probs = model.logits(image[None], torch.tensor([ids]))[0].log_softmax(-1)[:, :sot]
        hidden = [i for i, token in enumerate(ids) if token == mask]
        place = min(hidden, key=lambda i: (-float(log_probs[i].max()), i))
        full = [int(log_probs[i].argmax()) if token == mask else token for i, token in enumerate(ids)]
        candidates = log_probs[place].topk(top_k).indices.tolist()
        captions = [tokenizer.decode([*full[1:place], token, *full[place + 1:-1]]).strip() for token in candidates]
        cosines = torch.tensor([cosine(clip, image, caption, tokenizer) for caption in captions])
        value = log_probs[place][candidates] + scale * (cosines / 0.01).log_softmax(0)
        ids[place] = candidates[int(value.argmax())]
        log_prob[place] = float(log_probs[place, ids[place]])
    return ids, log_prob


@pytest.mark.parametrize("scale", [0.2, 1.0, 1e6])
def test_guided_decoding_equals_a_naive_loop(model, clip, image, tokenizer, scale):
    """At 1e6 the CLIP-best of the candidates wins at each step. The probabilities that are said are the model's own."""
    found = generate(model, image, length=5, guide=Guide(clip, image, tokenizer, scale, 4), return_trace=True)
    for one, text, log_prob in zip(image, found.text.tolist(), found.log_prob.tolist(), strict=True):
        ids, expected = naive(model, clip, one, tokenizer, 5, scale, 4)
        assert text == ids and log_prob == pytest.approx(expected, abs=1e-4)


def test_one_long_call_is_split_into_batches(clip, image, tokenizer, monkeypatch):
    monkeypatch.setattr(clip_guidance, "TEXTS_PER_BATCH", 3)
    guide = Guide(clip, image, tokenizer)
    captions = ["a red star", "a red circle", "a blue star", "a blue circle", "a star"]
    found = guide.cosines(captions * 2, [*range(5)] * 2)
    assert [len(call.args[0]) for call in clip.tokenizer.mock_calls] == [3, 2] and guide.texts == [1] * 5
    expected = [cosine(clip, one, caption, tokenizer) for one, caption in zip(image, captions, strict=True)]
    assert found.tolist() == pytest.approx(expected * 2, abs=1e-5)


def test_reranking_keeps_the_most_similar_of_the_drawn_captions(clip, image, tokenizer):
    for name in (*MODELS, "ARC-ViT-Ti-8"):
        model, options = opinionated(name), dict(length=5, samples=4)

        def drawn(model=model, options=options, **more):
            return generate(model, image, **options, **more, sampling=Sampling(1.0, generator=seeded(0)))

        every = decode_captions(drawn(), tokenizer)
        best = [max(every[4 * i:4 * i + 4], key=lambda caption, i=i: cosine(clip, image[i], caption, tokenizer))
                for i in range(5)]
        guide = Guide(clip, image, tokenizer)
        assert decode_captions(drawn(guide=guide, rerank=True), tokenizer) == best
        assert len(set(every)) > 4 and guide.texts == [len(set(every[4 * i:4 * i + 4])) for i in range(5)]
        with pytest.raises(ValueError, match="another number of images"):
            generate(model, image[1:], guide=guide)


def test_samples_of_an_image_are_consecutive_and_infilling_has_them_too(model, image):
    text = torch.tensor([[model.vocab_size - 2, i, model.vocab_size, model.vocab_size - 1] for i in range(5)])
    drawn = generate(model, image, text=text, samples=3, sampling=Sampling(1.0))
    assert drawn[:, 1].tolist() == [i for i in range(5) for _ in range(3)]


@pytest.mark.parametrize("spec, parsed", [
    ("ViT-B-32:a/b.pt", ("ViT-B-32", "a/b.pt")), ("ViT-B-32:C:clip.pt", ("ViT-B-32", "C:clip.pt")),
    ("local-dir:a/b", ("local-dir:a/b", None)), ("hf-hub:x/y", ("hf-hub:x/y", None))])
def test_model_and_file_are_told_apart(spec, parsed):
    assert clip_models.parse(spec) == parsed
