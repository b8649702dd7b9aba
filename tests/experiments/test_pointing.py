"""Claims about the pointing game."""
import random
import re
import statistics

import pytest
import torch
from core.likelihoods import reveal

import open_clip_mdc
from experiments import pointing
from open_clip_mdc.decoding.attention_maps import WordMaps


@pytest.fixture(scope="module")
def mdc(runs):
    return open_clip_mdc.load(runs / "mdc", device="cpu", precision="fp32")


def test_an_objects_patches_are_those_whose_centre_it_covers_and_the_one_with_its_own():
    rng = random.Random(0)
    for _ in range(200):
        item = {"x": rng.random(), "y": rng.random(), "radius": rng.choice([0.01, 0.2, 0.6])}
        rows, columns = rng.choice([(4, 4), (7, 5)])
        own = pointing.own_patches(item, (rows, columns)).view(rows, columns)
        for row in range(rows):
            for column in range(columns):
                y, x = (row + 0.5) / rows, (column + 0.5) / columns
                covered = max(abs(y - item["y"]), abs(x - item["x"])) <= item["radius"]
                holds = (int(item["y"] * rows), int(item["x"] * columns)) == (row, column)
                assert own[row, column] == (covered or holds)
    assert pointing.middle((3, 3)).tolist() == [0] * 4 + [1] + [0] * 4
    assert pointing.middle((2, 3)).view(2, 3).tolist() == [[0, 0.5, 0], [0, 0.5, 0]]


def test_words_are_found_at_their_tokens(mdc):
    caption, item = "a blue star left of a red circle", {"colour": "red", "shape": "circle"}
    ids = mdc.tokenizer(caption)[0]
    for kind, places in pointing.words_of(caption, item, mdc.tokenizer):
        assert mdc.tokenizer.decode(ids[places].tolist()).strip() == item[kind]
    assert not list(pointing.words_of(caption, {"colour": "red", "shape": "star"}, mdc.tokenizer))


def test_masked_diffusion_says_a_caption_in_the_order_of_its_confidence_and_the_other_from_left_to_right(mdc, runs):
    caption = "a blue star left of a red circle"
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    text = mdc.tokenizer([caption] * 2)
    step = pointing.spoken(mdc, image, text).step
    n = int((text[0] == mdc.model.vocab_size - 1).nonzero()[0]) + 1
    for i in range(2):
        order = [place for place, _ in reveal(text[i, :n], mdc.model.vocab_size, lambda noisy, i=i: mdc.model.logits(
            image[i:i + 1], noisy[None], torch.ones(1, n, dtype=torch.bool))[0].softmax(-1))]
        assert [order.index(p) for p in range(1, n)] == step[i, 1:n].tolist()
        assert step[i, 0] == -1 and (step[i, n:] == -1).all()
    arc = open_clip_mdc.load(runs / "arc", device="cpu", precision="fp32")
    assert pointing.spoken(arc, image, text).step[0, :n].tolist() == list(range(-1, n - 1))


def test_who_looks_at_the_object_hits_and_who_looks_elsewhere_does_not(mdc, scenes, monkeypatch):
    """By attention written by hand: the first layer looks at the patch of the object's centre, the second never."""
    found = pointing.read_scenes(str(scenes / "val/00000.tar"), 12)
    numbers = iter(found)

    def written(model, image, decoded):
        for text, scene in zip(decoded.text, (next(numbers) for _ in range(len(image))), strict=True):
            position = torch.arange(1, int((text == model.vocab_size - 1).nonzero()[0]) + 1)
            attention = torch.zeros(len(position), 2, 3, 16)
            for item in scene["objects"]:
                own = int(item["y"] * 4) * 4 + int(item["x"] * 4)
                foreign = int((~pointing.own_patches(item, (4, 4))).nonzero()[0])
                for _, places in pointing.words_of(scene["caption"], item, mdc.tokenizer):
                    for place in places:
                        attention[place - 1, 0, :, own] = 1.0
                        attention[place - 1, 1, :, foreign] = 0.5
            yield WordMaps(position, attention)

    monkeypatch.setattr(pointing, "word_maps", lambda *of: list(written(*of)))
    results = pointing.hits(mdc, found)
    assert len(results) == 12 and all(len(own) == 4 for own in results)  # colour and shape of two objects
    for own in results:
        assert [words[2:] for _, words in own] == [[1, 1, 1, 0]] * 4  # any, all layers, of which the first is the surer


def test_the_error_of_a_share_is_by_images():
    rng = random.Random(1)
    alone = [[float(rng.random() < 0.3)] for _ in range(50)]
    mean, error = pointing.share(alone)
    values = [x for x, in alone]
    assert mean == pytest.approx(statistics.fmean(values))
    assert error == pytest.approx(1.96 * statistics.stdev(values) / 50 ** 0.5)
    assert pointing.share([own * 4 for own in alone]) == pytest.approx((mean, error))  # the same words again


def test_the_table_has_every_model_and_layer(runs, scenes, capsys):
    shard = str(scenes / "val/00000.tar")
    pointing.main(["--scenes", shard, "--runs", f"MDC={runs}/mdc", f"ARC={runs}/arc", "--limit", "20"])
    lines = capsys.readouterr().out.splitlines()
    layers = len(open_clip_mdc.load(runs / "mdc").model.text.blocks)
    assert lines[0].startswith("| model | words | number | chance | the middle | any object | all layers | layer 1 |")
    assert lines[0].endswith(f"layer {layers} |") and len(lines) == 2 + 2 * 3
    assert lines[2].startswith("| MDC | colour and shape | 80 | ") and lines[3].startswith("| MDC | colour | 40 | ")
    chance = statistics.fmean(pointing.own_patches(item, (4, 4)).double().mean().item()
                              for scene in pointing.read_scenes(shard, 20) for item in scene["objects"])
    assert float(re.search(r"80 \| ([\d.]+) ±", lines[2])[1]) == pytest.approx(100 * chance, abs=0.05)
