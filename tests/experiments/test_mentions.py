"""Claims about mentions.py: measures equal those of a plain loop, and the best guess is that of the world's law."""
import math

import open_clip
import pytest
import torch
from conftest import VOCAB, captions, images, magnified, read_json, run_folder, run_tool, seeded

from experiments import mentions
from open_clip_mdc import register
from open_clip_mdc.likelihood.log_likelihood import mean_image
from open_clip_mdc.objectives.config import CaptionCfg
from open_clip_mdc.objectives.registry import OBJECTIVES
from open_clip_mdc.scenes import mentions as world
from open_clip_mdc.text.packing import NoisedCaptions
from open_clip_mdc.text.special_tokens import mask_id, valid_tokens

PLACES = torch.tensor([[1, 2, 4, 5], [2, 1, 6, 3], [5, 4, 2, 1]])  # of mentions, in captions of 8 tokens or more
TEXT = captions([8, 12, 9])


def embeddings(model):
    with torch.no_grad():
        return model.encode_image_tokens(images(3)), mean_image(model, [images(8, seed=1)])


WORLD = TEXT, torch.full((3,), 1 / 3, dtype=torch.float64)  # as if there were no other captions


def measured(model, embs, blind, draws=3):
    corruptions = mentions.as_trained(model, TEXT, draws, seeded(5))
    return mentions.measure(model, embs, blind, TEXT, PLACES, corruptions, WORLD)


def noise(model, draws):
    """The corruptions that `measured` draws."""
    generator = seeded(5)
    for draw in range(draws):
        u = (draw + 1 - torch.rand(len(TEXT), generator=generator, dtype=torch.float64)) / draws
        yield model.corrupt(TEXT, u, generator)


def one_loss(model, embs, noised, row, position):
    """-log p of a token from the plain `logits` of one caption, as every other algorithm reads them."""
    length = int(valid_tokens(TEXT, VOCAB)[row].sum())
    model.encode_image_tokens = lambda _: embs[None]  # what `logits` looks at
    text = noised.text[row:row + 1, :length]
    logits = model.logits(None, text, torch.ones_like(text, dtype=torch.bool))[0]
    del model.encode_image_tokens
    return -logits[position - model.causal].log_softmax(0)[TEXT[row, position]]


@pytest.mark.parametrize("objective, cfg", [("mdc", {}), ("arc", {}), ("mdc", {"t_min": 0.15, "t_max": 0.15})])
def test_the_measure_is_that_of_a_plain_loop_over_captions_and_tokens(objective, cfg):
    model = magnified(objective, **cfg)
    embs, blind = embeddings(model)
    found = measured(model, embs, blind)
    expected = {name: torch.zeros(PLACES.shape, dtype=torch.float64) for name in found}
    for noised in noise(model, 3):
        guess = mentions.best_guess(noised, TEXT, PLACES, *WORLD)
        expected["gain"] += noised.weight.gather(1, PLACES).double() * guess / 3
    expected["gain"] -= found["loss"]
    for noised in noise(model, 3):
        for row in range(3):
            for k, position in enumerate(PLACES[row].tolist()):
                if not noised.loss_mask[row, position]:
                    continue
                weight = float(noised.weight[row, position]) / 3
                leaf = embs[row].clone().requires_grad_()
                loss, without = (one_loss(model, e, noised, row, position) for e in (leaf, blind))
                loss.backward()
                for name, value in (("loss", loss), ("gap", without - loss), ("gradient", leaf.grad.norm()),
                                    ("weight", 1.0)):
                    expected[name][row, k] += weight * float(torch.as_tensor(value).detach())
    assert sum(bool(x.any()) for x in expected.values()) == 5
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("redundancy", [0.0, 0.9])
def test_the_best_guess_of_a_reader_of_words_is_that_of_the_worlds_law(redundancy):
    """By hand: 8 words may stand first, 4 where the order is known, and a shape is its colour's as often as it is."""
    possible, p = zip(*world.law(redundancy), strict=True)
    assert len(set(possible)) == 1024 and math.fsum(p) == pytest.approx(1)
    register()
    tokenizer = open_clip.get_tokenizer("MDC-ViT-Ti-8")
    law, vocab = (tokenizer(list(possible)), torch.tensor(p, dtype=torch.float64)), tokenizer.vocab_size
    text = tokenizer(["a red circle left of a blue circle", "a star yellow up above a circle green"])
    places = torch.tensor([[2, 3, 7, 8], [2, 3, 7, 8]])
    known, odd = redundancy + (1 - redundancy) / 4, (1 - redundancy) / 4

    def guess(corrupt, **cfg):
        noised = OBJECTIVES[corrupt].corrupt(text, vocab, CaptionCfg(corrupt, **cfg), torch.ones(2))
        return mentions.best_guess(noised, text, places, *law).exp()

    torch.testing.assert_close(guess("arc"), torch.tensor([[8, 1 / known, 4, 1 / odd], [8, 1 / known, 4, 1 / odd]],
                                                          dtype=torch.float64))
    torch.testing.assert_close(guess("mdc", t_min=1.0), torch.full((2, 4), 8.0, dtype=torch.float64))  # all hidden
    hidden = torch.zeros_like(text, dtype=torch.bool)
    hidden[0, 3] = hidden[1, [2, 3, 7]] = True
    noised = NoisedCaptions(text.masked_fill(hidden, mask_id(vocab)), hidden, hidden.float(), hidden, False,
                            torch.ones(2))
    found = mentions.best_guess(noised, text, places, *law).exp()
    assert found[0, 1] == pytest.approx(1 / known) and found[1].tolist()[:3] == pytest.approx([4, 4, 1 / odd])


def test_mentions_are_found_where_captions_say_them_and_other_captions_are_refused():
    words = torch.tensor([7, 8, 9])
    text = torch.tensor([[1, 7, 8, 2, 9, 7, 0], [1, 2, 2, 9, 9, 8, 7]])
    assert mentions.mention_positions(text, words).tolist() == [[1, 2, 4, 5], [3, 4, 5, 6]]
    with pytest.raises(ValueError, match="mention 3 to 4 colours and shapes"):
        mentions.mention_positions(torch.tensor([[1, 7, 8, 2, 9, 7], [7, 8, 9, 1, 2, 2]]), words)


def test_a_checkpoint_is_measured_by_command_once_for_each_version_of_it(scenes, tmp_path):
    world, run, out = tmp_path / "world", tmp_path / "run--r90--s0", tmp_path / "results/contexts"
    run_tool(["scenes", "--out", world, "--world", "mentions", "--num-train", "8", "--num-val", "5", "--num-probe",
              "1", "--num-pairs", "1"])
    run_folder(run, "MDC-ViT-Ti-8")
    checkpoint = str(run / "checkpoints/epoch_1.pt")

    def measure(*data):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["mentions", "--pretrained", checkpoint, "--name", "r90", "--out", str(out),
                                       "--data", *(data or [str(world / "val/00000.tar")])])
            mentions.main()

    measure()
    [path] = out.glob("*.json")
    result, items = read_json(path), read_json(out / "items" / path.name)
    assert len(items["images"]) == 5 and {len(values) for values in items["values"].values()} == {5}
    for name, value in result["metrics"].items():
        context, place = "left_" * name.startswith("left_"), name.rpartition("_")[2]
        weights = items["values"][f"{context}weight_{place}"]
        assert value == pytest.approx(sum(items["values"][name]) / sum(weights), rel=1e-4)
    before = path.stat().st_mtime_ns
    measure()
    assert path.stat().st_mtime_ns == before
    with pytest.raises(SystemExit, match="captions in two orders: give --data of"):
        measure(str(scenes / "val/00000.tar"))
