"""Claims about masked diffusion decoding (Eq. 6): which tokens each step reveals, and that others stay as they are."""
import math
from functools import partial

import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer
from scipy.stats import chisquare

from open_clip_mdc.decoding.confidence import fully_masked, guided, tokenize_with_masks, unmask_by_confidence
from open_clip_mdc.decoding.generate import generate
from open_clip_mdc.decoding.options import check
from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.integration.factory import OpenCLIPCaptioner as Captioner
from open_clip_mdc.likelihood import exact as estimators
from open_clip_mdc.likelihood import log_likelihood as scoring
from open_clip_mdc.text.special_tokens import decode_captions, valid_tokens

VISION = dict(image_size=32, patch_size=8, width=64, head_width=32, layers=2)
TEXT = dict(context_length=16, vocab_size=60, width=32, heads=2, layers=2)
SOT, EOT, MASK = 58, 59, 60


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = Captioner(64, VISION, TEXT, dict(objective="mdc")).eval()
    torch.nn.init.normal_(model.text.output.weight, std=0.3)  # peaked, so that what was revealed matters
    torch.nn.init.normal_(model.text.token_embedding.weight, std=0.5)
    torch.nn.init.normal_(model.text.positional_embedding, std=0.5)
    torch.nn.init.normal_(model.length_head.weight, std=0.1 * model.length_head.narrowing)
    return model


@pytest.fixture(scope="module")
def image():
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 3


@pytest.fixture(scope="module")
def tokenizer():
    return SimpleTokenizer()


def network(model, image):
    with torch.no_grad():
        return partial(model.token_logits, model.text.project_image(model.encode_image_tokens(image)))


def table(logits):
    """A network that sees nothing: the logits of a position are a row of the table [L, V]."""
    def token_logits(text, predicted):
        return torch.as_tensor(logits, dtype=torch.float32).expand(*text.shape, -1).flatten(0, 1)[predicted]

    return lambda lengths: token_logits


def unmask(network, text, vocab_size=60, **options):
    text = torch.tensor(text) if isinstance(text, list) else text
    return unmask_by_confidence(network, text, valid_tokens(text, vocab_size), vocab_size, **options)


def log(*rows):
    return torch.tensor(rows).log()


# Words 0 to 3, SOT 4, EOT 5, MASK 6. Most probable token of positions 1 to 3: 0 at 0.5, 1 at 0.6, 2 at 0.4.
HAND = log([1.0, 0, 0, 0, 0, 0], [0.5, 0.45, 0.05, 0, 0, 0], [0.1, 0.6, 0.1, 0.1, 0.0, 0.1],
           [0.2, 0.2, 0.4, 0.2, 0, 0], [0, 0, 0, 0, 0, 1.0])


def test_a_table_of_logits_gives_the_caption_and_the_order_worked_out_by_hand():
    decoded = unmask(table(HAND), [[4, 6, 6, 6, 5]], 6)
    assert decoded.text.tolist() == [[4, 0, 1, 2, 5]]
    assert decoded.step.tolist() == [[-1, 1, 0, 2, -1]]
    assert decoded.log_prob[0].exp().tolist() == pytest.approx([1, 0.5, 0.6, 0.4, 1])


def test_a_probability_reveals_at_once_what_is_at_least_so_certain_and_one_position_where_nothing_is():
    assert unmask(table(HAND), [[4, 6, 6, 6, 5]], 6, tokens_per_step=0.45).step.tolist() == [[-1, 0, 0, 1, -1]]
    assert unmask(table(HAND), [[4, 6, 6, 6, 5]], 6, tokens_per_step=0.9).step.tolist() == [[-1, 1, 0, 2, -1]]
    certain = torch.full((5, 6), -torch.inf)
    certain[:, 1] = 0.0
    assert unmask(table(certain), [[4, 6, 6, 6, 5]], 6, tokens_per_step=1.0).step.tolist() == [[-1, 0, 0, 0, -1]]


def test_what_was_revealed_changes_the_rest():
    """The first position is sure of 0. The second predicts 1 on its own, and 2 once it stands beside 0."""
    def token_logits(text, predicted):
        after = log([0.1, 0.1, 0.8, 0, 0]) if text[0, 1] == 0 else log([0.3, 0.6, 0.1, 0, 0])
        return torch.cat((log([0, 0, 0, 1.0, 0]), log([0.9, 0.1, 0, 0, 0]), after))[predicted]

    def network(lengths):
        return token_logits

    decoded = unmask(network, [[3, 5, 5]], 5)
    assert decoded.text.tolist() == [[3, 0, 2]]
    assert decoded.log_prob.exp().tolist()[0][1:] == pytest.approx([0.9, 0.8])
    assert unmask(network, [[3, 5, 5]], 5, tokens_per_step=2).text.tolist() == [[3, 0, 1]]


def test_forbidden_tokens_are_not_chosen_and_cost_their_position_confidence():
    """Position 1 predicts EOT with 0.8. Its second choice with 0.2 must wait for position 2 with 0.3."""
    logits = log([0, 0, 0, 1.0, 0], [0.2, 0, 0, 0, 0.8], [0.25, 0.3, 0.25, 0.1, 0.1])
    decoded = unmask(table(logits), [[3, 5, 5]], 5, forbidden=(3, 4))
    assert decoded.text.tolist() == [[3, 0, 1]] and decoded.step.tolist() == [[-1, 1, 0]]
    assert decoded.log_prob.exp()[0, 1].item() == pytest.approx(0.2)


def test_a_place_takes_its_next_best_where_a_neighbour_has_its_token_and_waits_for_it():
    """Each is most sure of 1. The second has it, so that the others have 2 at 0.4 and 0 at 0.3. The last is free."""
    logits = log([1.0, 0, 0, 0, 0, 0], [0.0, 0.6, 0.4, 0, 0, 0], [0.1, 0.9, 0, 0, 0, 0], [0.3, 0.5, 0.2, 0, 0, 0],
                 [0.3, 0.35, 0.35, 0, 0, 0], [0, 0, 0, 0, 0, 1.0])
    text = [[4, 6, 6, 6, 6, 5]]
    assert unmask(table(logits), text, 6).text.tolist() == [[4, 1, 1, 1, 1, 5]]
    decoded = unmask(table(logits), text, 6, repeats="avoid")
    assert decoded.text.tolist() == [[4, 2, 1, 0, 1, 5]] and decoded.step.tolist() == [[-1, 1, 0, 3, 2, -1]]
    assert decoded.log_prob[0, 1:5].exp().tolist() == pytest.approx([0.4, 0.9, 0.3, 0.35])
    given = unmask(table(logits), [[4, 6, 1, 0, 6, 5]], 6, repeats="avoid")  # neighbours that the user gave count
    assert given.text.tolist() == [[4, 2, 1, 0, 1, 5]] and given.step.tolist() == [[-1, 0, -1, -1, 1, -1]]


def decode_by_table(tokenizer, caption, probability, given=()):
    """Decode a caption each of whose places gives its own token a probability. Returns ids and the caption's ids."""
    ids = [tokenizer.sot_token_id, *tokenizer.encode(caption), tokenizer.eot_token_id]
    size, places = tokenizer.vocab_size, torch.arange(len(ids))
    logits = torch.full((len(ids), size), (1 - probability) / size).log()
    logits[places, ids] = math.log(probability)
    text = [size if 0 < i < len(ids) - 1 and i not in given else token for i, token in enumerate(ids)]
    return unmask(table(logits), [text], size, repeats="avoid", forbidden=ids[::len(ids) - 1]).text[0].tolist(), ids


@pytest.mark.parametrize(("caption", "probability"), [
    ("player number 11 in red", 0.4), ("a bus to 200 street", 0.4), ("route 77 sign .", 0.4),
    ("so cold ! !", 0.96), ("wave bye bye", 0.96)])
def test_equal_digits_and_a_sure_word_may_stand_side_by_side(tokenizer, caption, probability):
    found, expected = decode_by_table(tokenizer, caption, probability)
    assert found == expected


@pytest.mark.parametrize("word", ["is", "a", "red", "dogs", ",", "."])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.94])
def test_a_word_that_two_places_want_stands_once_unless_it_was_given_twice(tokenizer, word, probability):
    found, expected = decode_by_table(tokenizer, f"dog {word} {word} running", probability)
    assert found.count(expected[2]) == 1 and found[1] == expected[1] and found[4:] == expected[4:]
    found, _ = decode_by_table(tokenizer, f"dog {word} {word} running", probability, given=(2, 3))
    assert found == expected


def test_of_equals_the_leftmost_position_and_the_lowest_token_come_first():
    decoded = unmask(table(torch.zeros(5, 6)), [[4, 6, 6, 6, 5, 0], [4, 6, 1, 6, 5, 0]], 6, forbidden=(0,))
    assert decoded.text.tolist() == [[4, 1, 1, 1, 5, 0], [4, 1, 1, 1, 5, 0]]
    assert decoded.step.tolist() == [[-1, 0, 1, 2, -1, -1], [-1, 0, -1, 1, -1, -1]]


@pytest.mark.parametrize("tokens_per_step, expected", [
    (1, [1] * 7), (3, [3, 3, 1]), (99, [7])])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_step_reveals_exactly_k_asks_for_masks_only_and_never_changes_a_token(
        model, image, tokens_per_step, expected, temperature):
    seen = []

    def recording(lengths):
        inner = network(model, image)(lengths)

        def token_logits(text, predicted):
            assert torch.equal(predicted, (text == MASK).flatten().nonzero()[:, 0])
            seen.append(text)
            return inner(text, predicted)

        return token_logits

    start = torch.tensor([[SOT] + [MASK] * 7 + [EOT]]).repeat(len(image), 1)
    decoded = unmask(recording, start, tokens_per_step=tokens_per_step, sampling=Sampling(temperature))
    assert len(seen) == len(expected)
    for number, (before, after, count) in enumerate(zip(seen, [*seen[1:], decoded.text], expected, strict=True)):
        revealed = (before == MASK) & (after != MASK)
        assert (revealed.sum(1) == count).all()
        assert torch.equal(before[before != MASK], after[before != MASK])
        assert torch.equal(revealed, decoded.step == number)


def naive(model, image, length, count):
    """Eq. 6 in loops: one image, everything computed anew at each step."""
    ids = [SOT] + [MASK] * length + [EOT]
    while MASK in ids:
        probs = model.logits(image, torch.tensor([ids]))[0].softmax(-1).tolist()
        ranked = []
        for i in (i for i, token in enumerate(ids) if token == MASK):
            best = max(probs[i][:SOT])
            ranked.append((-best, i, probs[i].index(best)))
        for _, i, token in sorted(ranked)[:count]:
            ids[i] = token
    return ids


@pytest.mark.parametrize("count", [1, 3])
def test_greedy_decoding_equals_a_naive_loop_over_all_logits(model, image, count):
    text = generate(model, image, length=7, tokens_per_step=count)
    with torch.no_grad():
        assert text.tolist() == [naive(model, one, 7, count) for one in image.split(1)]
    assert len({tuple(row) for row in text.tolist()}) > 1  # else the images would not matter


@pytest.mark.parametrize("options", [
    dict(length=7), dict(length=7, tokens_per_step=3), dict(length="auto"),
    dict(length=7, guidance_scale=3.0, blind=torch.zeros(16, 64))])
def test_the_batch_does_not_change_an_images_caption(model, image, options):
    together = generate(model, image, return_trace=True, **options)
    for i in range(len(image)):
        alone = generate(model, image[i:i + 1], return_trace=True, **options)
        valid = valid_tokens(alone.text, 60)[0]
        assert torch.equal(together.text[i][:len(valid)][valid], alone.text[0][valid])
        torch.testing.assert_close(together.log_prob[i][:len(valid)], alone.log_prob[0], rtol=1e-3, atol=1e-4)


def test_the_image_is_encoded_and_projected_once_and_only_masks_get_logits(model, image):
    calls = {"visual": [], "kv": [], "output": []}
    hooks = [module.register_forward_hook(lambda m, x, y, name=name: calls[name].append(x[0].shape))
             for name, module in (("visual", model.visual), ("kv", model.text.blocks[0].cross_kv),
                                  ("output", model.text.output))]
    generate(model, image, length=7, tokens_per_step=2)
    for hook in hooks:
        hook.remove()
    assert len(calls["visual"]) == len(calls["kv"]) == 1
    assert [shape[0] // len(image) for shape in calls["output"]] == [7, 5, 3, 1]


def test_eot_follows_exactly_n_tokens(model, image):
    forced = generate(model, image, length=7)
    assert forced.shape == (5, 9) and (forced[:, 0] == SOT).all() and (forced[:, 8] == EOT).all()
    assert forced.dtype == torch.long and (forced[:, 1:8] < SOT).all()


def test_infilling_keeps_the_given_words_and_fills_the_rest(model, image):
    text = torch.tensor([
        [SOT, MASK, 7, MASK, MASK, EOT, 0, 0], [SOT, 3, 4, 5, 6, MASK, 9, EOT], [SOT, MASK, EOT, 0, 0, 0, 0, 0],
        [SOT, 8, EOT, 0, 0, 0, 0, 0], [SOT, 1, MASK, 2, EOT, 0, 0, 0]])
    filled = generate(model, image, text=text)
    assert torch.equal(filled[text != MASK], text[text != MASK])
    assert (filled[text == MASK] < SOT).all()
    for i in range(len(image)):  # neither the other rows nor their padding matter
        alone = generate(model, image[i:i + 1], text=text[i:i + 1])[0]
        assert torch.equal(alone, filled[i, :len(alone)]) and not filled[i, len(alone):].any()


def test_one_template_serves_all_images(model, image):
    text = torch.tensor([[SOT, MASK, 7, MASK, EOT]])
    assert torch.equal(generate(model, image, text=text),
                       generate(model, image, text=text.repeat(5, 1)))


@pytest.mark.parametrize("mask", ["[mask]", "[Mask]", "<mask>", "<MASK>", "[ MASK ]", "&lt;mask&gt;", "［MASK］"])
def test_a_mask_in_any_spelling_is_one(tokenizer, mask):
    expected = tokenize_with_masks(tokenizer, "a [MASK] dog on a [MASK] .")
    assert torch.equal(tokenize_with_masks(tokenizer, f"a {mask} dog on a [MASK] ."), expected)
    assert torch.equal(tokenize_with_masks(tokenizer, f"a {mask} dog on a{mask}."), expected)
    check({"text": mask}, "--{}".format)


@pytest.mark.parametrize("word", ["<end_of_text>", "<start_of_text>", "<End_Of_Text>", "&lt;end_of_text&gt;"])
def test_a_template_with_an_end_inside_is_refused(tokenizer, word):
    with pytest.raises(ValueError, match="holds <start_of_text> or <end_of_text>, which would start or end it"):
        tokenize_with_masks(tokenizer, f"a [MASK] <mask> {word} b")


def test_templates_are_tokenised_as_captions_with_masks_between(tokenizer):
    masked = tokenize_with_masks(tokenizer, ["a [MASK] dog on a [MASK]", "[MASK][MASK] Dogs", "no gap"])
    words = tokenizer(["a red dog on a sofa", "two big dogs", "no gap"])
    assert masked.shape == words.shape
    gaps = masked == 49408
    assert gaps.nonzero().tolist() == [[0, 2], [0, 6], [1, 1], [1, 2]]
    assert torch.equal(masked[~gaps], words[~gaps])
    assert decode_captions(masked, tokenizer)[0] == "a [MASK] dog on a [MASK]"
    with pytest.raises(ValueError, match="has 8 tokens with SOT and EOT, but the model reads at most 7: shorten it"):
        tokenize_with_masks(tokenizer, "a [MASK] dog on a [MASK]", context_length=7)
    assert torch.equal(tokenize_with_masks(tokenizer, "a [MASK] dog on a [MASK]", context_length=8), masked[:1, :8])


@pytest.mark.parametrize("caption", [
    "une façade à côté du café", "собака бежит по траве", "一只狗 在草地上", "ein hund 🐕 läuft", "naïve ångström ½"])
def test_unicode_captions_survive_the_round_trip(tokenizer, caption):
    truth = tokenizer(caption)
    sure = torch.nn.functional.one_hot(truth[0], tokenizer.vocab_size) * 20.0
    start = fully_masked((truth == 49407).nonzero()[:, 1] - 1, 49408)
    decoded = unmask(table(sure[:start.shape[1]]), start, 49408, tokens_per_step=2)
    assert torch.equal(decoded.text, truth[:, :start.shape[1]])
    assert decode_captions(decoded.text, tokenizer) == [caption]


def test_guidance_scale_one_is_plain_decoding_bit_for_bit_and_runs_no_blind_pass(model, image):
    forwards, blind = [], scoring.mean_image(model, [image])
    hook = model.text.ln_final.register_forward_hook(lambda *_: forwards.append(1))
    plain = generate(model, image, length=6, return_trace=True)
    assert len(forwards) == 6
    unguided = generate(model, image, length=6, return_trace=True, guidance_scale=1.0, blind=blind)
    assert len(forwards) == 6 + 6
    guided = generate(model, image, length=6, return_trace=True, guidance_scale=3.0, blind=blind)
    hook.remove()
    assert len(forwards) == 12 + 12
    assert all(map(torch.equal, plain, unguided))
    assert not torch.equal(plain.text, guided.text)


def test_guidance_against_the_image_itself_changes_nothing(model, image):
    with torch.no_grad():
        itself = model.encode_image_tokens(image[:1])[0]
    plain = generate(model, image[:1], length=6, return_trace=True)
    guided = generate(model, image[:1], length=6, return_trace=True, guidance_scale=3.0, blind=itself)
    other = generate(model, image[:1], length=6, guidance_scale=3.0, blind=scoring.mean_image(model, [image]))
    assert torch.equal(plain.text, guided.text) and not torch.equal(plain.text, other)
    torch.testing.assert_close(plain.log_prob, guided.log_prob, rtol=1e-4, atol=1e-4)


def test_guidance_leans_towards_what_only_the_image_explains():
    """blind + s (seen - blind) at s = 2: p^2 / blind, worked out by hand."""
    seen, blind = log([0.5, 0.3, 0.1, 0.05, 0.05]), log([0.7, 0.1, 0.1, 0.05, 0.05])
    weights = torch.tensor([0.25 / 0.7, 0.09 / 0.1, 0.01 / 0.1, 0.05, 0.05])
    kl = []
    combined = guided(table(seen + 3), table(blind - 5), 2.0, kl)  # logits: log-probabilities but for a constant
    decoded = unmask(combined, [[3, 5]], 5)
    assert unmask(table(seen), [[3, 5]], 5).text.tolist() == [[3, 0]]
    assert decoded.text.tolist() == [[3, 1]]
    assert decoded.log_prob[0, 1].exp().item() == pytest.approx((weights[1] / weights.sum()).item())
    by_hand = sum(p * (p.log() - q) for p, q in zip(weights / weights.sum(), seen.flatten(), strict=True))
    assert torch.cat(kl).tolist() == pytest.approx([by_hand.item()], rel=1e-5)


def test_sampled_tokens_come_as_often_as_they_are_likely():
    probability = [0.45, 0.3, 0.2, 0.05]
    start = torch.tensor([[4, 6, 5]]).repeat(20000, 1)
    decoded = unmask(table(log([*probability, 0, 0])), start, 6,
                     sampling=Sampling(1.0, generator=torch.Generator().manual_seed(0)))
    counts = decoded.text[:, 1].bincount(minlength=4)
    assert chisquare(counts, [20000 * p for p in probability]).pvalue > 0.001
    torch.testing.assert_close(decoded.log_prob[:, 1].exp(), torch.tensor(probability)[decoded.text[:, 1]])
    warm = Sampling(2.0, top_k=2, generator=torch.Generator().manual_seed(0))
    warm = unmask(table(log([*probability, 0, 0])), start, 6, sampling=warm).text[:, 1].bincount(minlength=2)
    odds = (0.45 / 0.3) ** 0.5
    assert chisquare(warm, [20000 * odds / (1 + odds), 20000 / (1 + odds)]).pvalue > 0.001


def test_whole_captions_come_as_often_as_the_model_says():
    """Two positions: the first is always surer, and the second depends on it."""
    first, second = [0.8, 0.2], {0: [0.3, 0.7], 1: [0.6, 0.4], 4: [0.5, 0.5]}

    def token_logits(text, predicted):
        tables = [[[0] * 4, first + [0, 0], second[ids[1]] + [0, 0], [0] * 4] for ids in text.tolist()]
        return torch.tensor(tables).log().flatten(0, 1)[predicted]

    start = torch.tensor([[2, 4, 4, 3]]).repeat(20000, 1)
    drawn = Sampling(1.0, generator=torch.Generator().manual_seed(0))
    text = unmask(lambda lengths: token_logits, start, 4, sampling=drawn).text
    counts = (2 * text[:, 1] + text[:, 2]).bincount(minlength=4)
    assert chisquare(counts, [20000 * p for p in (0.24, 0.56, 0.12, 0.08)]).pvalue > 0.001


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_eot_is_decoded_too_the_log_probs_add_up_to_the_papers_heuristic_score(model, image, temperature):
    start = torch.tensor([[SOT] + [MASK] * 6]).repeat(5, 1)
    decoded = unmask(network(model, image), start,
                     sampling=Sampling(temperature, generator=torch.Generator().manual_seed(0)))
    assert not (decoded.text == EOT).any()  # else the caption would end there
    heuristic = estimators.heuristic(network(model, image), decoded.text, 60)
    torch.testing.assert_close(decoded.log_prob.sum(1), heuristic.log_likelihood, rtol=1e-5, atol=1e-5)
    assert torch.equal(decoded.step, heuristic.order)


@pytest.mark.parametrize("options", [dict(), dict(sampling=Sampling(1.0)), dict(tokens_per_step=2)])
def test_the_log_probs_of_generate_are_those_of_each_token_when_it_was_revealed_beside_the_given_eot(
        model, image, options):
    """Each step is computed again from the tokens visible at that step.

    With a given EOT this is not the heuristic score.
    """
    decoded = generate(model, image, length=6, return_trace=True, **options)
    by_hand = torch.zeros_like(decoded.log_prob)
    for step in range(int(decoded.step.max()) + 1):
        stood = decoded.text.masked_fill(decoded.step >= step, MASK)
        with torch.no_grad():
            log_probs = model.logits(image, stood).log_softmax(-1).gather(-1, decoded.text[..., None]).squeeze(-1)
        by_hand = torch.where(decoded.step == step, log_probs, by_hand)
    torch.testing.assert_close(decoded.log_prob, by_hand, rtol=1e-4, atol=1e-4)
    score = scoring.log_likelihood(model, image, decoded.text)
    assert not torch.allclose(decoded.log_prob.sum(1), score, atol=0.1)


def test_captions_of_different_length_begin_each_with_its_own_masks_and_eot():
    assert fully_masked(torch.tensor([2, 4]), 60).tolist() == [
        [SOT, MASK, MASK, EOT, 0, 0], [SOT, MASK, MASK, MASK, MASK, EOT]]


def test_the_mode_of_the_model_is_restored(model, image):
    for mode in (True, False):
        model.train(mode)
        generate(model, image[:1], length=2)
        assert model.training is mode


@pytest.mark.parametrize("scale", [float("inf"), float("-inf"), float("nan"), 1e39])
def test_a_scale_of_guidance_that_float32_cannot_multiply_by_is_refused(model, image, scale):
    with pytest.raises(ValueError, match="guidance_scale is .*: it must be a number from -1e6 to 1e6"):
        generate(model, image, length=3, guidance_scale=scale, blind=torch.zeros(16, 64))


def test_what_makes_no_sense_is_refused(model, image):
    for options, message in (
            (dict(length=15), "from 1 to 14"), (dict(length="long"), "'auto'"), (dict(length=0), "from 1 to 14"),
            (dict(length=(5, 6)), "'auto'"), (dict(length=3, tokens_per_step=0), "tokens_per_step"),
            (dict(length=3, sampling=Sampling(-1.0)), "temperature is -1.0"),
            (dict(length=3, sampling=Sampling(top_p=0.9)), "need a temperature"),
            (dict(length=3, guidance_scale=2.0), "mean_image"), (dict(text=torch.tensor([[SOT, MASK, 3]])), "no EOT"),
            (dict(text=torch.tensor([[SOT, MASK, EOT]] * 2)), "5 images, but 2 texts"),
            (dict(text=torch.tensor([[SOT, 3, EOT, MASK]])), "padding")):
        with pytest.raises(ValueError, match=message):
            generate(model, image, **options)
    with pytest.raises(ValueError, match="padding"):  # of one row of two
        unmask(table(HAND), [[4, 6, 5, 0, 0], [4, 6, 5, 6, 0]], 6)
    with pytest.raises(TypeError, match="num_beams"):
        generate(model, image, num_beams=6)
