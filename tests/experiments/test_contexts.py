"""Claims about `make contexts` and `make sentences`: who reads what, ratios, errors, known verdicts."""
import random

import open_clip
import pytest
import torch
from conftest import VOCAB, captions, images, magnified, seeded
from helpers import dry_run, flags_of, write_items
from PIL import Image

from experiments import commands
from experiments.contexts import left_context
from experiments.flickr8k import sentence_pairs
from experiments.mentions import as_trained, predicted_places, visible_tokens
from experiments.report import claims, contexts
from experiments.report.results import Result
from experiments.report.sides import Measured
from experiments.sentences import LEFT, from_the_left, measure, words_of
from experiments.tables import between
from experiments.tables import contexts as tables
from experiments.tables.scales import CONTEXTS, RICH, SENTENCES
from open_clip_mdc import register, unregister
from open_clip_mdc.text.packing import pack
from open_clip_mdc.text.special_tokens import valid_tokens

TEXT = captions([8, 12, 9])
ASKED = torch.tensor([[4, 5], [6, 3], [2, 5]])  # two mentions of each caption


def losses(model, embs, text, noised):
    """-log p of the predicted tokens, by row and position in the caption."""
    row, place = noised.loss_mask.nonzero(as_tuple=True)
    position = place if noised.position is None else noised.position[row, place]
    with torch.no_grad():
        found = model.token_nll(embs, pack(text, noised, VOCAB))
    return dict(zip(zip(row.tolist(), position.tolist(), strict=True), found.tolist(), strict=True))


@pytest.mark.parametrize("objective", ["mdc", "arc", "cappa", "block-diffusion"])
@pytest.mark.parametrize("left", [False, True])
def test_the_visible_tokens_are_those_whose_change_changes_the_prediction(objective, left):
    model = magnified(objective)
    with torch.no_grad():
        embs = model.encode_image_tokens(images(3))
    corruptions = [left_context(model, TEXT, asked) for asked in ASKED.unbind(1)] if left else as_trained(
        model, TEXT, 2, seeded(3))
    checked = 0
    for noised in corruptions:
        before = losses(model, embs, TEXT, noised)
        seen = visible_tokens(noised, TEXT, ASKED)
        for j in range(1, 7):  # not SOT, and no padding
            where = (noised.text == (TEXT if noised.tokens is None else noised.tokens)) & (
                (torch.arange(TEXT.shape[1])[None] if noised.position is None else noised.position) == j)
            # The text is read as another word. What is asked for stays, but for a causal row, where it is the text.
            changed = noised._replace(text=torch.where(where, (noised.text + 3) % 40 + 1, noised.text))
            if noised.tokens is None:
                changed = changed._replace(tokens=TEXT, loss_mask=noised.loss_mask) if not model.causal else changed
            text = torch.where(where, (TEXT + 3) % 40 + 1, TEXT) if model.causal else TEXT
            after = losses(model, embs, text, changed)
            for row in range(3):
                for k, asked in enumerate(ASKED[row].tolist()):
                    if asked != j and (row, asked) in before:
                        differs = abs(before[row, asked] - after[row, asked]) > 1e-6
                        assert differs == bool(seen[row, k, j]), (row, asked, j)
                        checked += 1
    assert checked > 20


@pytest.mark.parametrize("objective", ["mdc", "arc", "block-diffusion"])
def test_the_left_context_shows_all_words_before_the_asked_one_and_no_other(objective):
    model = magnified(objective)
    for asked in ASKED.unbind(1):
        noised = left_context(model, TEXT, asked)
        seen = visible_tokens(noised, TEXT, asked[:, None])[:, 0]
        words = valid_tokens(TEXT, VOCAB)  # a masked row shows how long the caption is, and no word after the asked one
        assert torch.equal(seen & words, (torch.arange(TEXT.shape[1]) < asked[:, None]) & words)
        row, position = predicted_places(noised)
        assert row.tolist() == [0, 1, 2] and torch.equal(position, asked)


def made_up(seed, images=200, left=0.1, level=1.0, words=0.3):
    """Weighted values of each image: gain 1 at the first mention, `level` at the second, and `left` from the left."""
    generator = seeded(seed)

    def noisy(mean):
        return (mean + 0.1 * torch.randn(images, generator=generator, dtype=torch.float64)).tolist()

    found = {}
    for context, ratio in (("", level), ("left_", left)):
        for place, share in zip(tables.PLACES, (1.0, ratio), strict=True):
            found |= {f"{context}{name}_{place}": noisy(share) for name in tables.MEASURES}
            found[f"{context}weight_{place}"] = [1.0] * images
    found["left_gain_second"] = noisy(words)
    return found


def test_an_images_influence_on_a_ratio_is_what_leaving_it_out_changes():
    values = {name: [x + 0.1 * i for i, x in enumerate(of)] for name, of in made_up(0, 40).items()}
    ratio, influence = contexts.share(values, "left gain")
    for image in range(0, 40, 7):
        rest = {name: of[:image] + of[image + 1:] for name, of in values.items()}
        assert (ratio - contexts.share(rest, "left gain")[0]) * 39 / 40 == pytest.approx(influence[image], rel=.1,
                                                                                      abs=1e-5)


def verdicts(tmp_path, ledger, scale, values_of):
    """Return the claims of a ledger by id, for three seeds of each row. `values_of` is of a cell and a seed."""
    results = {}
    for cell in tables.TABLES[ledger](scale):
        name = f"{cell.run.name(0).rpartition('--s')[0]}/epoch_{commands.checkpoint_epoch(scale, cell.run)}"
        key = commands.variant(cell.evaluation), *cell.evaluation.datasets, name
        for seed in range(3):
            path = tmp_path / f"{cell.row}--{seed}.json"
            write_items(path, list(range(200)), values_of(cell, seed))
            results.setdefault(key, {})[seed] = Result({}, path)
    return {row.claim.id: row for row in contexts.give_verdicts(
        claims.claims_of(ledger, scale), Measured(results, scale))}


def judged(tmp_path, **rows):
    return verdicts(tmp_path, "contexts", CONTEXTS, lambda cell, seed: made_up(
        seed + 10 * sum(cell.row.encode()), **rows.get(cell.row.partition(", ")[2], {})))


def test_verdicts_are_those_of_data_with_a_known_answer(tmp_path):
    rows = judged(tmp_path, MDC={"level": 1.0, "left": 0.3, "words": 0.3}, ARC={"level": 0.3, "left": 0.3},
                  **{"blocks of 4": {"level": 0.6}, "blocks of 2": {"level": 0.4}, "CapPa": {"words": -0.2}})
    shows = {"own-mdc", "control", "own-arc", "left-arc", "blocks-4", "blocks-arc", "blocks-2"}
    assert {name: rows[name].verdict for name in shows} == dict.fromkeys(shows, "shows")
    assert rows["own-cappa"].verdict == "no verdict" and "CapPa does not use the other words" in rows["own-cappa"].why
    assert rows["control"].finding.difference == pytest.approx(0.7, abs=0.05)


def test_a_network_that_is_not_level_is_not_called_level(tmp_path):
    rows = judged(tmp_path, MDC={"level": 0.6, "words": 0.3, "left": 0.3})
    assert rows["own-mdc"].verdict == "contradicts" and rows["own-mdc"].finding.difference == pytest.approx(-0.4,
                                                                                                        abs=0.05)


def test_the_command_measures_both_contexts_of_every_row(tmp_path):
    commands = dry_run("contexts", tmp_path, "contexts")
    measuring = [command for command in commands if "experiments.mentions" in command]
    for command, data in zip(measuring, tables.REDUNDANCIES, strict=True):
        assert (flags_of(command)["--name"], flags_of(command)["--data"].split("/")[-3]) == (data, data)
        assert all(f"--{data}-e4--s0/" in path or f"--{data}--s0/" in path for path in command if path.endswith(".pt"))
    assert sum("--train-data" in command for command in commands) == len(tables.BETWEEN) + 2


def test_between_has_one_network_at_both_ends_of_its_lines_and_draws_them(tmp_path):
    cells = list(between.between(CONTEXTS))
    of_row = {row: {c[1:4] for c in cells if c.row == row} for row in {c.row for c in cells}}  # column, run, evaluation
    assert of_row["blocks, 1"] == of_row["Mix, 100 %"] and of_row["blocks, whole"] == of_row["Mix, 0 %"]
    assert of_row["Mix by beam, 50 %"] < {(column, run, evaluation._replace(flags=("--sampler", "beam")))
                                          for column, run, evaluation in of_row["Mix, 50 %"]}
    commands = dry_run("contexts", tmp_path, "between")
    assert sum("--train-data" in command for command in commands) == len(tables.BETWEEN) - 2  # CapPa, blocks of 3
    assert len(claims.claims_of("between", CONTEXTS)) == 10
    between.plot(CONTEXTS, {cell: {0: 1.0, 1: 2.0} for cell in cells}, tmp_path / "between.png")
    assert Image.open(tmp_path / "between.png").width == 4 * 300
    rich = between.between(RICH)  # where no second word is known to be told by the first
    assert {(cell.run.rate, cell.column == between.GAIN) for cell in rich} == {(RICH.chosen["MDC"], False)}
    assert len(claims.claims_of("between", RICH)) == 13


def test_words_of_both_sentences_are_found_without_full_stops():
    register()
    tokenizer = open_clip.get_tokenizer("MDC-small-timm-tf_efficientnet_lite0")
    pairs = sentence_pairs(["A dog runs.", "two brown dogs play with a frisbee", "grass ."])
    assert [pair[0] for pair in pairs] == [pair[1] for pair in pairs[-1:] + pairs[:-1]]  # each stands at both places
    text = tokenizer([" ".join(pair) for pair in pairs])
    for row, pair, (first, second) in zip(text, pairs, words_of(pairs, tokenizer, text.shape[1]), strict=True):
        for sentence, chosen in zip(pair, (first, second), strict=True):
            assert tokenizer.decode(row[chosen].tolist()).split() == sentence.lower().removesuffix(" .").split()
        assert int((first & second).sum()) == 0
    unregister()


@pytest.mark.parametrize("objective", ["mdc", "arc", "block-diffusion"])
def test_a_blind_twin_that_reads_the_same_has_a_gain_of_nothing_but_the_image(objective):
    model = magnified(objective)
    with torch.no_grad():
        embs = model.encode_image_tokens(images(3))
        grey = model.encode_image_tokens(images(1, seed=7))[0]
    words = torch.zeros(3, 2, TEXT.shape[1], dtype=torch.bool)
    words[:, 0, 1:3] = words[:, 1, 4:6] = True
    with torch.no_grad():
        draws = as_trained(model, TEXT, 4, seeded(1))
        found = measure(model, model, embs, grey, TEXT, words, draws)
        same = measure(model, model, grey.expand_as(embs), grey, TEXT, words, draws)
    assert same["gain"].abs().max() < 1e-5 < found["gain"].abs().min()
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for noised in as_trained(model, TEXT, 4, seeded(1)):
        weights = noised.weight[noised.loss_mask].tolist()
        for ((row, position), loss), weight in zip(losses(model, embs, TEXT, noised).items(), weights, strict=True):
            for place in (0, 1):
                if words[row, place, position]:
                    expected[row, place] += weight * loss / 4
    torch.testing.assert_close(found["loss"], expected, rtol=1e-4, atol=1e-5)


def test_from_the_left_words_of_each_sentence_are_asked_for_alone_with_all_before_them_visible():
    words = torch.zeros(len(TEXT), 2, TEXT.shape[1], dtype=torch.bool)
    words[:, 0, 1:3] = words[:, 1, 4:6] = True
    found = from_the_left(magnified("mdc"), TEXT, words, seeded(0))
    assert len(found) == 2 * LEFT
    for number, noised in enumerate(found):
        place = noised.loss_mask.int().argmax(1)
        assert noised.loss_mask.sum(1).eq(1).all()
        assert words[torch.arange(len(TEXT)), number // LEFT, place].all()
        before = torch.arange(TEXT.shape[1]) < place[:, None]
        assert (noised.text == TEXT)[before].all() and not (noised.text == TEXT)[noised.loss_mask].any()


def judged_sentences(tmp_path, second: float, gain: float = 0.3):
    """Verdicts where the blind twins lose 3 on a sentence that is said first, and so much on one said second."""
    def values_of(cell, seed):
        draw = random.Random(seed + sum(cell.row.encode())).gauss
        measured = {"blind": (3, second), "gain": (gain, gain), "weight": (1, 1)}
        low = measured | {"gain": (gain, gain / 10)}
        return {f"{context}{name}_{place}": [draw(mean, 0.05) for _ in range(200)]
                for context, means_of in (("", measured if cell.row.startswith("MDC") else low), ("left_", low))
                for name, means in means_of.items() for place, mean in zip(tables.PLACES, means, strict=True)}
    return verdicts(tmp_path, "sentences", SENTENCES, values_of)


def test_sentences_have_verdicts_only_where_the_blind_twins_use_the_first_sentence(tmp_path):
    told = judged_sentences(tmp_path, second=2.8)
    assert {name: row.verdict for name, row in told.items()} == {
        "photo-mdc": "shows", "photo-arc": "contradicts", "photo-difference": "shows", "photo-mdc-8": "shows",
        "photo-difference-8": "shows", "photo-left-8": "shows", "photo-blocks": "not resolved",
        "photo-arc-equal": "contradicts", "photo-mdc-equal": "shows", "photo-difference-equal": "shows",
        "photo-left-equal": "shows", "photo-blocks-equal": "not resolved"}
    assert {row.verdict for row in judged_sentences(tmp_path, second=3.1).values()} == {"no verdict"}
    lost = judged_sentences(tmp_path, second=2.8, gain=-0.1).values()
    assert {row.verdict for row in lost} == {"no verdict"}
    assert all(row.why.endswith("gains nothing by the image") for row in lost)


def test_the_command_trains_a_blind_twin_of_every_run_and_measures_both(tmp_path):
    printed = dry_run("sentences", tmp_path, "sentences")
    trained = {flags_of(words)["--name"]: words for words in printed if "--train-data" in words}
    order, pairs = list(trained), []
    for words in printed:
        if "experiments.sentences" in words:
            blind, data = words.index("--blind"), words.index("--data")
            pairs += zip(words[words.index("--pretrained") + 1:blind], words[blind + 1:data], strict=True)
    assert len(pairs) == len(tables.SENTENCES) + len(tables.EQUAL)
    for number, paths in enumerate(pairs):
        first, second = (path.split("/")[-3] for path in paths)
        twin = trained[second]
        start = flags_of(twin)["--pretrained"].split("/")[-3]
        assert start in order[:order.index(second)] and "--lock-image" in twin
        if number < len(tables.SENTENCES):
            assert flags_of(twin)["--pretrained"] == paths[0]
        else:  # both go on from the same weights by the same steps
            both = zip(["", *twin[:-1]], trained[first], twin, strict=True)
            assert [flag for flag, a, b in both if a != b] == ["--train-data", "--name"]
            assert start in order[:order.index(first)]
