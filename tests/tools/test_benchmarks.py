"""Claims about benchmarks/: the baselines compute what the package computes, and results are written by section."""
from argparse import Namespace

import pytest
import torch
from conftest import captions, images, run_folder, tiny_captioner

from benchmarks import bulk, plain
from benchmarks.captions import evenly_spaced, read_captions
from benchmarks.contestants import algorithm_1, contestant, count_flops, tokenize
from open_clip_mdc.objectives.loss import CaptionLoss
from open_clip_mdc.text.special_tokens import valid_tokens


def test_algorithm_1_is_the_packages_loss_where_chance_has_no_say():
    model = tiny_captioner(t_min=1.0, t_max=1.0, length_head=False)
    image, text = images(4), captions([4, 7, 9, 12])
    expected = CaptionLoss()(**model(image, text))
    torch.testing.assert_close(algorithm_1(model, image, text), expected)


def test_algorithm_1_gathers_the_masked_rows_before_the_loss(monkeypatch):
    rows = []
    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr("benchmarks.contestants.F.cross_entropy",
                        lambda logits, *args, **options: rows.append(len(logits)) or
                        cross_entropy(logits, *args, **options))
    model, text = tiny_captioner(t_min=0.5, t_max=0.5), captions([12] * 8)
    algorithm_1(model, images(8), text)
    assert 0 < rows[0] < 8 * 11


def test_the_plain_loops_decode_and_score_what_the_package_does_and_encode_once(monkeypatch):
    model = tiny_captioner(seed=2)
    image, text = images(2), captions([6, 9, 5, 8]).view(2, 2, -1)
    generated, expected = model.generate(image, length=7), model.log_likelihood(image, text, "heuristic")
    calls = []
    encode = model.encode_image_tokens
    monkeypatch.setattr(model, "encode_image_tokens", lambda x: calls.append(len(x)) or encode(x))
    assert torch.equal(plain.unmask(model, image, 7, steps=7)[:, :9], generated[:, :9])
    assert calls == [2]
    scores = torch.stack([plain.heuristic(model, *case) for case in zip(image, text, strict=True)])
    torch.testing.assert_close(scores, expected)
    assert calls == [2, 1, 1]
    assert plain.draws(model, image[0], text[0], number=5).shape == (2, 5)


def test_a_terms_mean_over_all_masks_is_the_likelihood_of_the_package():
    model, image, text = tiny_captioner(seed=3), images(1), captions([4])
    terms = plain.draws(model, image[0], text, number=3000)[0]  # 3 tokens: few masks, drawn over and over
    exact = model.log_likelihood(image, text, "monte_carlo", num_samples=3000)
    assert 3 * terms.mean().item() == pytest.approx(exact.item(), abs=4 * 3 * terms.std().item() / 3000 ** 0.5)


def test_multiplications_of_mdc_follow_the_real_tokens_and_those_of_algorithm_1_do_not():
    flops = {}
    for name in ("MDC", "Algorithm 1", "CLIP"):
        side = contestant(name, "ViT-Ti-8")
        for length in (8, 40):
            text = torch.zeros(2, 77, dtype=torch.long)
            text[:, 0], text[:, 1:length - 1], text[:, length - 1] = 663, 5, 664
            flops[name, length] = count_flops(lambda text=text, side=side: side.step(torch.randn(2, 3, 32, 32), text))
    assert flops["MDC", 8] < 0.8 * flops["MDC", 40] < 0.8 * flops["Algorithm 1", 8]
    assert flops["Algorithm 1", 8] == flops["Algorithm 1", 40] and flops["CLIP", 8] == flops["CLIP", 40]


def test_a_shard_is_timed_beside_its_own_tensors_in_the_same_process(scenes, tmp_path):
    args = Namespace(scenes=scenes, pretrained=str(run_folder(tmp_path / "run", "MDC-ViT-Ti-8")), rounds=1)
    costs = bulk.beside_the_model(args, tmp_path)
    assert 0 < costs["model"].cpu and 0 < costs["shard"].wall and (tmp_path / "00000.parquet").exists()


def test_captions_come_from_a_file_or_are_rendered_with_the_lengths_of_flickr8k(tmp_path):
    (tmp_path / "few.txt").write_text("a dog\n\ntwo cats\n")
    (tmp_path / "few.json").write_text('{"annotations": [{"caption": "a dog"}]}')
    (tmp_path / "none.txt").write_text("\n")
    assert read_captions(str(tmp_path / "few.txt")) == ["a dog", "two cats"]
    assert read_captions(str(tmp_path / "few.json")) == ["a dog"]
    with pytest.raises(ValueError, match="none.txt: no caption in it"):
        read_captions(str(tmp_path / "none.txt"))
    rendered = read_captions(None)
    assert rendered == read_captions(None)
    lengths = valid_tokens(tokenize("MDC", "ViT-B-32", evenly_spaced(rendered, 500)), 49408).sum(1).double()
    assert lengths.mean().item() == pytest.approx(14.1, abs=0.5)  # Flickr8k's test captions: 14.1, 4.0
    assert lengths.std().item() == pytest.approx(4.0, abs=0.6)
    long = valid_tokens(tokenize("MDC", "ViT-B-32", evenly_spaced(rendered, 8, long=True)), 49408).sum(1)
    assert long.tolist() == [77] * 8
