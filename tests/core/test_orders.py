"""Claims about both directions, prefixes and weights by the image."""
import open_clip
import pytest
import torch
from conftest import VOCAB, captions, images, refused, seeded, tiny_captioner, with_weights_of
from likelihoods import naive_decoder
from torch.nn.functional import cross_entropy
from training import losses, open_clip_train

from open_clip_mdc import register
from open_clip_mdc.objectives import CaptionCfg
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.packing import NoisedCaptions, pack

U = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)


def test_rows_of_both_directions_are_arc_and_its_mirror():
    """The mirror is a causal model that reads the caption from its end, with the positions turned as well."""
    model, text, image = tiny_captioner("bicap"), captions([5, 9, 12]), images(3)
    with torch.no_grad():
        packed = pack(text, model.corrupt(text, U), VOCAB)
        found = model(image, packed)["token_nll"].split([4, 4, 8, 8, 11, 11])
        rightwards = with_weights_of(model, "arc")(image, text)["token_nll"].split([4, 8, 11])
        for b, n in enumerate((5, 9, 12)):
            assert torch.allclose(found[2 * b], rightwards[b], atol=2e-6)
            mirror = tiny_captioner("bicap")
            mirror.text.positional_embedding[:n] = model.text.positional_embedding[:n].flip(0)
            ids = text[b, :n].flip(0)
            hidden, _ = naive_decoder(mirror.text, ids, model.encode_image_tokens(image[b:b + 1])[0], True)
            expected = cross_entropy(model.text.output(hidden[:-1]), ids[1:], reduction="none")
            assert torch.allclose(found[2 * b + 1].flip(0), expected, atol=2e-6)
    assert packed.num_target.tolist() == [4, 4, 8, 8, 11, 11]


def test_a_prefix_is_seen_whole_and_what_follows_is_read_from_left_to_right():
    model, text, image = tiny_captioner("prefix"), captions([5, 9, 12]), images(3)
    noised, lasts = model.corrupt(text, U), [0, 4, 8]  # (1 - U) * (4, 8, 11), rounded down
    assert noised.loss_mask.int().argmax(1).tolist() == lasts
    with torch.no_grad():
        found = model(image, pack(text, noised, VOCAB))["token_nll"].split([4, 4, 3])
        for b, (n, last) in enumerate(zip((5, 9, 12), lasts, strict=True)):
            relation = torch.tensor([[q >= k or max(q, k) <= last for k in range(n)] for q in range(n)])
            ids, true = text[b:b + 1, :n], torch.ones(1, n, dtype=torch.bool)
            row = NoisedCaptions(ids, true, true.float(), true, False, torch.zeros(1), ids.roll(-1, 1), valid=true,
                                 sight=relation[None])
            each = model(image[b:b + 1], pack(ids, row, VOCAB))["token_nll"]
            assert torch.allclose(found[b], each[last:n - 1], atol=2e-6)
    empty = pack(text, model.corrupt(text, torch.ones(3, dtype=torch.float64)), VOCAB)
    assert torch.allclose(*(out["token_nll"] for out in (
        model(image, empty), with_weights_of(model, "arc")(image, text))), atol=2e-6)


def test_a_word_weighs_what_the_image_tells_of_it_in_training_alone():
    model, text, image = tiny_captioner("visual"), captions([5, 9, 12]), images(3)
    prepared = model.prepare(text)
    embs = model.encode_image_tokens(image)
    blind = (-model.token_nll(embs.mean(0).expand_as(embs), prepared)).exp()
    assert torch.equal(model(image, prepared)["token_weight"], prepared.predicted.weight)
    found = model.train()(image, prepared)
    assert torch.allclose(found["token_weight"], prepared.predicted.weight * (1 - blind), atol=1e-6)
    assert not found["token_weight"].requires_grad
    CaptionLoss()(**found).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_table_gives_a_word_one_weight_wherever_it_stands(csv, tmp_path):
    """The loss by hand: those of MDC's masked tokens, by 1/t and by the table, over all that could be masked."""
    register()
    model = open_clip.create_model("Visual-ViT-Ti-8-table")
    tokenizer, table = open_clip.get_tokenizer("Visual-ViT-Ti-8-table"), {"red": 0.25, "of": 0.0}
    text, image = tokenizer(["a red circle left of a blue square", "a blue square left of a red star"]), images(2)
    by_word = {"a": 0.43, "red": 0.25, "circle": 0.94, "left": 0.94, "of": 0.0, "blue": 0.94, "square": 0.94,
               "star": 0.94, "<end_of_text>": 0.43}
    model.caption_cfg.word_weights = table
    mdc = open_clip.create_model("MDC-ViT-Ti-8")
    mdc.load_state_dict(model.state_dict())
    u = torch.tensor([0.4, 1.0], dtype=torch.float64)  # t of .7 and 1
    masked = pack(text, mdc.corrupt(text, u, seeded(0)), 665)
    plain = mdc.train()(image, masked)["token_nll"]
    found = model.train()(image, pack(text, model.corrupt(text, u, seeded(0)), 665))
    said = [tokenizer.decode([x]).strip() for x in masked.predicted.token.tolist()]
    weights = torch.tensor(list(map(by_word.get, said))) / torch.tensor([0.7, 1.0])[masked.predicted.row]
    assert {"red", "of", "a", "<end_of_text>"} <= set(said)
    assert torch.allclose(found["token_weight"], weights)
    loss = CaptionLoss()(**found, output_dict=True)["caption_loss"]
    assert loss.item() == pytest.approx((weights @ plain).item() / 18, rel=1e-5)
    model.caption_cfg.word_weights = {"quartzite": 1.0}
    with pytest.raises(ValueError, match=r"'quartzite', which is \d tokens"):
        model.corrupt(text, u)
    for objective, weight in (("visual-table", -1.0), ("mdc", 1.0)):
        said = refused(ValueError, CaptionCfg, objective=objective, word_weights={"red": weight})
        assert "0 or more, and is for an objective that reads it" in said
    open_clip_train("--precision amp --workers 1 --val-data", csv, data=csv, logs=tmp_path,
                    model="Visual-ViT-Ti-8-table")
    assert len(losses(tmp_path)) == 4


@pytest.mark.parametrize("objective", ["bicap", "prefix", "cappa"])
def test_they_caption_and_score_as_arc_does(objective):
    model, image, text = tiny_captioner(objective), images(3), captions([5, 9, 12])
    arc = with_weights_of(model, "arc")
    assert torch.equal(model.generate(image), arc.generate(image))
    assert torch.equal(model.log_likelihood(image, text), arc.log_likelihood(image, text))
