"""Claims about masked diffusion decoding (Eq. 6): which tokens each step reveals, and that others stay as they are."""
import copy
import math

import pytest
import torch
from conftest import refused, tiny_captioner
from open_clip.tokenizer import SimpleTokenizer
from torch.testing import assert_close

from open_clip_mdc.decoding.confidence import guided, tokenize_with_masks, unmask_by_confidence
from open_clip_mdc.decoding.generate import generate
from open_clip_mdc.decoding.options import Unmasking, check_text
from open_clip_mdc.text.special_tokens import decode_captions

SOT, EOT, MASK = 58, 59, 60
TOKENIZER = SimpleTokenizer()


@pytest.fixture(scope="module")
def model():
    model = tiny_captioner()
    torch.nn.init.normal_(model.text.positional_embedding, std=0.5)
    torch.nn.init.normal_(model.length_head.weight, std=0.1 * model.length_head.narrowing)
    return model


def table(logits):
    """A network that sees nothing: the logits of a position are a row of the table [L, V]."""
    def token_logits(text, predicted):
        return torch.as_tensor(logits, dtype=torch.float32).expand(*text.shape, -1).flatten(0, 1)[predicted]

    return lambda lengths: token_logits


def unmask(network, text, vocab_size, forbidden=(), **options):
    return unmask_by_confidence(network, torch.tensor(text), vocab_size, Unmasking(**options), forbidden)


def test_a_probability_of_1_reveals_at_once_what_is_certain():
    certain = torch.tensor([-torch.inf, 0.0, -torch.inf]).expand(4, 3)
    assert unmask(table(certain), [[1, 3, 3, 2]], 3, tokens_per_step=1.0).step.tolist() == [[-1, 0, 0, -1]]


def decode_by_table(caption, probability, given=()):
    """Decode a caption each of whose places gives its own token a probability. Returns ids and the caption's ids."""
    ids = [TOKENIZER.sot_token_id, *TOKENIZER.encode(caption), TOKENIZER.eot_token_id]
    size, places = TOKENIZER.vocab_size, torch.arange(len(ids))
    logits = torch.full((len(ids), size), (1 - probability) / size).log()
    logits[places, ids] = math.log(probability)
    text = [size if 0 < i < len(ids) - 1 and i not in given else token for i, token in enumerate(ids)]
    return unmask(table(logits), [text], size, repeats="avoid", forbidden=ids[::len(ids) - 1]).text[0].tolist(), ids


@pytest.mark.parametrize(("caption", "probability"), [
    ("player number 11 in red", 0.4), ("a bus to 200 street", 0.4), ("route 77 sign .", 0.4),
    ("so cold ! !", 0.96), ("wave bye bye", 0.96)])
def test_equal_digits_and_a_sure_word_may_stand_side_by_side(caption, probability):
    found, expected = decode_by_table(caption, probability)
    assert found == expected


@pytest.mark.parametrize("word", ["is", "a", "red", "dogs", ",", "."])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.94])
def test_a_word_that_two_places_want_stands_once_unless_it_was_given_twice(word, probability):
    found, expected = decode_by_table(f"dog {word} {word} running", probability)
    assert found.count(expected[2]) == 1 and found[1] == expected[1] and found[4:] == expected[4:]
    found, _ = decode_by_table(f"dog {word} {word} running", probability, given=(2, 3))
    assert found == expected


def test_of_equals_the_leftmost_position_and_the_lowest_token_come_first():
    decoded = unmask(table(torch.zeros(5, 6)), [[4, 6, 6, 6, 5, 0], [4, 6, 1, 6, 5, 0]], 6, forbidden=(0,))
    assert decoded.text.tolist() == [[4, 1, 1, 1, 5, 0], [4, 1, 1, 1, 5, 0]]
    assert decoded.step.tolist() == [[-1, 0, 1, 2, -1, -1], [-1, 0, -1, 1, -1, -1]]


GIVEN = torch.tensor([
    [SOT, MASK, 7, MASK, MASK, EOT, 0, 0], [SOT, 3, 4, 5, 6, MASK, 9, EOT], [SOT, MASK, EOT, 0, 0, 0, 0, 0],
    [SOT, 8, EOT, 0, 0, 0, 0, 0], [SOT, 1, MASK, 2, EOT, 0, 0, 0]])


@pytest.mark.parametrize("options", [
    dict(length=7), dict(length=7, tokens_per_step=3), dict(length="auto"), dict(text=GIVEN),
    dict(length=7, guidance_scale=3.0, blind=torch.zeros(16, 64))])
def test_the_batch_does_not_change_an_images_caption(model, image, options):
    """Its padding does not, either."""
    together = generate(model, image, return_trace=True, **options)
    for i in range(len(image)):
        own = options | ({"text": GIVEN[i:i + 1]} if "text" in options else {})
        alone = generate(model, image[i:i + 1], return_trace=True, **own)
        length = len(alone.text[0])
        assert torch.equal(together.text[i][:length], alone.text[0]) and not together.text[i][length:].any()
        assert_close(together.log_prob[i][:length], alone.log_prob[0], rtol=1e-3, atol=1e-4)


def test_the_image_is_encoded_and_projected_once_and_only_masks_get_logits(model, image):
    calls = {"visual": [], "kv": [], "output": []}
    model = copy.deepcopy(model)
    for name, module in (("visual", model.visual), ("kv", model.text.blocks[0].cross_kv),
                         ("output", model.text.output)):
        module.register_forward_hook(lambda m, x, y, name=name: calls[name].append(x[0].shape))
    generate(model, image, length=7, tokens_per_step=2)
    assert len(calls["visual"]) == len(calls["kv"]) == 1
    assert [shape[0] // len(image) for shape in calls["output"]] == [7, 5, 3, 1]


def test_captions_have_the_length_asked_for_no_special_id_inside_and_the_given_words(model, image):
    """Decode with a model that would rather end the caption."""
    model = copy.deepcopy(model)
    model.text.ln_final.bias.data.fill_(1.0)
    model.text.output.weight.data[[SOT, EOT]] += 0.5  # times 32 ones
    forced = generate(model, image, length=7)
    assert forced.shape == (5, 9) and (forced[:, 0] == SOT).all() and (forced[:, 8] == EOT).all()
    assert forced.dtype == torch.long and (forced[:, 1:8] < SOT).all() and len(forced.unique(dim=0)) > 1
    filled = generate(model, image, text=GIVEN)
    assert torch.equal(filled[GIVEN != MASK], GIVEN[GIVEN != MASK]) and (filled[GIVEN == MASK] < SOT).all()


@pytest.mark.parametrize("mask", ["[mask]", "[Mask]", "<mask>", "<MASK>", "[ MASK ]", "&lt;mask&gt;", "［MASK］"])
def test_a_mask_in_any_spelling_is_one(mask):
    expected = tokenize_with_masks(TOKENIZER, "a [MASK] dog on a [MASK] .")
    assert torch.equal(tokenize_with_masks(TOKENIZER, f"a {mask} dog on a [MASK] ."), expected)
    assert torch.equal(tokenize_with_masks(TOKENIZER, f"a {mask} dog on a{mask}."), expected)
    check_text(mask, None)


@pytest.mark.parametrize("word", ["<end_of_text>", "<start_of_text>", "<End_Of_Text>", "&lt;end_of_text&gt;"])
def test_a_template_with_an_end_inside_is_refused(word):
    said = refused(ValueError, tokenize_with_masks, TOKENIZER, f"a [MASK] <mask> {word} b")
    assert "holds <start_of_text> or <end_of_text>, which would start or end it" in said


def test_templates_are_tokenised_as_captions_with_masks_between():
    masked = tokenize_with_masks(TOKENIZER, ["a [MASK] dog on a [MASK]", "[MASK][MASK] Dogs", "no gap"])
    words = TOKENIZER(["a red dog on a sofa", "two big dogs", "no gap"])
    assert masked.shape == words.shape
    gaps = masked == 49408
    assert gaps.nonzero().tolist() == [[0, 2], [0, 6], [1, 1], [1, 2]]
    assert torch.equal(masked[~gaps], words[~gaps])
    assert decode_captions(masked, TOKENIZER)[0] == "a [MASK] dog on a [MASK]"
    said = refused(ValueError, tokenize_with_masks, TOKENIZER, "a [MASK] dog on a [MASK]", context_length=7)
    assert "has 8 tokens with SOT and EOT, but the model reads at most 7: shorten it" in said
    assert torch.equal(tokenize_with_masks(TOKENIZER, "a [MASK] dog on a [MASK]", context_length=8), masked[:1, :8])


def test_guidance_leans_towards_what_only_the_image_explains():
    """blind + s (seen - blind) at s = 2: p^2 / blind, worked out by hand."""
    seen, blind = torch.tensor([[[0.5, 0.3, 0.1, 0.05, 0.05]], [[0.7, 0.1, 0.1, 0.05, 0.05]]]).log()
    weights = torch.tensor([0.25 / 0.7, 0.09 / 0.1, 0.01 / 0.1, 0.05, 0.05])
    weights, kl = weights / weights.sum(), []
    combined = guided(table(seen + 3), table(blind - 5), 2.0, kl)  # logits: log-probabilities but for a constant
    decoded = unmask(combined, [[3, 5]], 5)
    assert unmask(table(seen), [[3, 5]], 5).text.tolist() == [[3, 0]] and decoded.text.tolist() == [[3, 1]]
    assert_close(decoded.log_prob[0, 1].exp(), weights[1])
    assert_close(torch.cat(kl), (weights * (weights.log() - seen)).sum(1))



def test_the_mode_of_the_model_is_restored(model, image):
    for mode in (True, False):
        model.train(mode)
        generate(model, image[:1], length=2)
        assert model.training is mode


def test_what_makes_no_sense_is_refused(model, image):
    for message, options in {
            "'auto'": dict(length=(5, 6)), "mean_image": dict(length=3, guidance_scale=2.0),
            "no EOT": dict(text=torch.tensor([[SOT, MASK, 3]])),
            "5 images, but 2 texts": dict(text=torch.tensor([[SOT, MASK, EOT]] * 2)),
            "padding": dict(text=torch.tensor([[SOT, 3, EOT, MASK]]))}.items():
        assert message in refused(ValueError, generate, model, image, **options)
    rows = [[4, 6, 5, 0, 0], [4, 6, 5, 6, 0]]
    assert "padding" in refused(ValueError, unmask, table(torch.zeros(5, 6)), rows, 6)  # of one row of two
