"""Claims about block diffusion and the rule of who sees whom."""
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, captions, complaint_of, images, run_folder, seeded, tiny_captioner

from open_clip_mdc.decoding.sampling import Sampling
from open_clip_mdc.objectives.blocks import two_streams
from open_clip_mdc.text.packing import NoisedCaptions, Sight, pack, sees
from open_clip_mdc.text.special_tokens import caption_lengths, eot_id, mask_id, target_tokens

SIX = torch.stack((captions([5, 9, 12]), captions([4, 4, 8], seed=1)))  # three captions of each of two images


def blocks(size: int, **options):
    return tiny_captioner("block-diffusion", block_sizes=[size], **options)


def test_one_rule_holds_every_order():
    """Against the masks that their papers draw, for 8 tokens, blocks of 2 and a prefix of 3."""
    place, clean = torch.arange(8), torch.zeros(1, 8, dtype=torch.bool)
    square = torch.ones(8, 8, dtype=torch.bool)
    assert (sees(Sight(torch.zeros(1, 8), ~clean)) == square).all()
    assert (sees(Sight(place[None], clean)) == square.tril()).all()
    assert (sees(Sight(7 - place[None], clean)) == square.triu()).all()
    prefix = square.tril()
    prefix[:3, :3] = True
    assert (sees(Sight((place - 2).clamp(min=0)[None], clean)) == prefix).all()
    # BD3-LM's three parts: within a noisy block, a noisy block to earlier clean ones, and clean blocks.
    block = place // 2
    same, earlier = block[:, None] == block, block[:, None] > block
    both = torch.cat((torch.cat((same, earlier), 1), torch.cat((torch.zeros_like(same), same | earlier), 1)))
    assert (sees(Sight(block.repeat(2)[None], torch.cat((~clean, clean), 1))) == both).all()


def naive_logits(model, image, text, size: int, hidden) -> torch.Tensor:
    """Logits [V] at the positions `hidden` of one block, by one row of that block and what it may read."""
    block = min(hidden) // size
    end = min((block + 1) * size, text.shape[1])
    row = text[:, :end].clone()
    row[0, list(hidden)] = mask_id(VOCAB)
    # Each finished block reads itself and those before it. The last one reads all.
    relation = torch.arange(end)[:, None] // size >= torch.arange(end) // size
    true = torch.ones(1, end, dtype=torch.bool)
    noised = NoisedCaptions(row, true, true.float(), true, False, torch.ones(1), row, None, true, relation[None])
    states = model.hidden(model.encode_image_tokens(image), pack(row, noised, VOCAB))
    return model.text.output(states)[list(hidden)]


def filled(text: torch.Tensor) -> torch.Tensor:
    """Return captions [B, 12] as blocks are cut from them: behind the end, more EOT."""
    return text.masked_fill(torch.arange(12) >= caption_lengths(text, VOCAB)[:, None], eot_id(VOCAB))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_training_rows_predict_as_each_block_alone_and_have_gradients(size):
    model, image, text = blocks(size), images(4), captions([3, 9, 12, 5])
    noised = model.corrupt(text, torch.rand(4, dtype=torch.float64, generator=seeded(0)), seeded(0))
    out = model(image, pack(text, noised, VOCAB))
    (out["token_nll"] * out["token_weight"]).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.text.parameters())
    assert (noised.position // size)[noised.loss_mask].unique().numel() > 1
    counts = [inside(row[None], size)[-1][-1] + 1 for row in text]
    # The last block has no clean copy.
    assert noised.valid.sum(1).tolist() == [count + (count - 1) // size * size for count in counts]
    for b, found in enumerate(out["token_nll"].split(noised.loss_mask.sum(1).tolist())):
        position, token = (x[b][noised.loss_mask[b]] for x in (noised.position, noised.tokens))
        for block in (position // size).unique():
            own = position // size == block
            logits = naive_logits(model, image[b:b + 1], filled(text[b:b + 1]), size, position[own].tolist())
            expected = -logits.log_softmax(1).gather(1, token[own, None])[:, 0]
            assert torch.allclose(found[own], expected, atol=2e-6)


def test_a_block_that_holds_the_whole_caption_is_masked_diffusion_to_the_bit():
    whole, mdc = blocks(7), tiny_captioner("mdc", length_head=False)
    whole.load_state_dict(mdc.state_dict())
    text, image, u = captions([7] * 5), images(5), torch.linspace(0.1, 1, 5, dtype=torch.float64)
    out = [model(image, pack(text, model.corrupt(text, u, seeded(3)), VOCAB)) for model in (whole, mdc)]
    assert all(torch.equal(out[0][key], out[1][key]) for key in ("token_nll", "token_weight", "num_target"))
    for one in out:
        (one["token_nll"] * one["token_weight"]).sum().backward()
    for one, other in zip(whole.parameters(), mdc.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_loss_is_an_unbiased_estimate_of_the_bound_of_all_blocks(size):
    """Against all orders of every block. (The bound of one block alone is test_objective's.)"""
    model, image, text, generator = blocks(size), images(1), captions([5]).expand(6000, -1), seeded(0)
    with torch.no_grad():
        exact = -over_orders(model, image, text[:1], size)[0]
        u = torch.rand(6000, dtype=torch.float64, generator=generator)
        drawn = pack(text, model.corrupt_nelbo(text, u, generator), VOCAB)
        nll = model.token_nll(model.encode_image_tokens(image).expand(6000, -1, -1), drawn)
        estimates = drawn.sum_rows(nll * drawn.predicted.weight)
    error = estimates.std().item() / 6000 ** 0.5
    assert abs(estimates.mean().item() - exact) < 4 * error + 1e-4
    assert error < 0.05 * exact


def test_each_caption_of_a_batch_is_cut_into_blocks_of_its_own_size():
    def streams(text, size):
        ids, position, valid, sight = two_streams(text, size, VOCAB, 12)
        return [torch.stack((ids, position, *sight))[:, b, valid[b]] for b in range(len(text))]

    text, size = captions([5, 8, 12]), torch.tensor([4, 3, 5])
    alone = [streams(*pair)[0] for pair in zip(text.split(1), size.split(1), strict=True)]
    assert all(map(torch.equal, streams(text, size), alone))


def test_the_times_of_blocks_are_uniform_and_stay_in_the_interval():
    model = blocks(3, t_min=0.5)
    text = captions([12] * 4000)
    noised = model.corrupt(text, torch.rand(4000, dtype=torch.float64), seeded(0))
    t = 1 / noised.weight[(noised.position == 11) & noised.loss_mask]
    assert t.min() > 0.5 and t.max() <= 1
    # A token masked with probability t has the density 8t/3 on [.5, 1]: the mean of t is 7/9.
    assert t.mean().item() == pytest.approx(7 / 9, abs=0.01)


def reordered(text: torch.Tensor, **given) -> NoisedCaptions:
    target = target_tokens(text, VOCAB)
    return NoisedCaptions(text.flip(1), target, target.float(), target, True, torch.zeros(len(text)), **given)


def test_reordered_text_without_an_answer_is_refused_by_the_name_of_its_objective():
    text = captions([12, 12, 12])
    with pytest.raises(ValueError, match="'backwards' reads other tokens than the caption's: .* NoisedCaptions.tokens"):
        pack(text, reordered(text), VOCAB, "backwards")
    assert pack(text, reordered(text, tokens=text.flip(1)), VOCAB).predicted.token.shape == (33,)
    for wrong, why in ({"tokens": text[:, :5]}, "several shapes"), ({"tokens": text, "valid": text < 0}, "not valid"), \
            ({"tokens": text, "sight": torch.zeros(3, 12, 12, dtype=torch.bool)}, "sees nothing"):
        with pytest.raises(ValueError, match=f"'backwards' .*{why}"):
            pack(text, reordered(text, **wrong), VOCAB, "backwards")


def inside(text: torch.Tensor, size: int) -> list[list[int]]:
    """The positions of each block of a caption [1, 12]. SOT is given."""
    end = min(12, -(-int(caption_lengths(text, VOCAB)) // size) * size)
    return [[p for p in range(start, min(start + size, end)) if p] for start in range(0, end, size)]


def by_confidence(model, image, text, size: int, hidden: list[int], write=False) -> Iterator[tuple[int, float]]:
    """The most confident position of a block first, by a naive loop, and log p of its token. `write` puts the best."""
    while hidden:
        log_prob = naive_logits(model, image, text, size, hidden).log_softmax(1)
        if write:
            log_prob[:, VOCAB - 2] = -torch.inf
        best = int(log_prob.amax(1).argmax())
        place = hidden.pop(best)
        if write:
            text[0, place] = log_prob[best].argmax()
        yield place, log_prob[best, text[0, place]].item()


@pytest.mark.parametrize("size", [1, 2, 4, 5, 12])
def test_the_likelihood_is_that_of_a_naive_loop_over_blocks(size):
    model, image, text = blocks(size), images(2), SIX
    with torch.inference_mode():
        found = model.log_likelihood(image, text, return_details=True)
        for b in range(2):
            for c in range(3):
                steps = found.order[b, c]
                order, expected = zip(*(pair for hidden in inside(text[b, c:c + 1], size) for pair in by_confidence(
                    model, image[b:b + 1], filled(text[b, c:c + 1]), size, hidden)), strict=True)
                assert found.log_likelihood[b, c].item() == pytest.approx(sum(expected), abs=2e-5)
                order = [p for p in order if p < caption_lengths(text[b, c], VOCAB)]
                assert sorted(order, key=lambda p: (p // size, steps[p])) == order
        assert torch.allclose(found.token_log_likelihood.sum(2), found.log_likelihood, atol=1e-5)
        alone = model.log_likelihood(image[1:], text[1:, 2:])
        assert torch.allclose(alone, found.log_likelihood[1:, 2:], atol=1e-5)


def over_orders(model, image, text, size: int) -> tuple[float, float]:
    """The chain rule within each block in all orders: its mean, and the logarithm of the mean probability."""
    whole, mean, likelihood = filled(text), 0.0, 0.0
    for own in inside(text, size):
        given = {}
        for hidden in (hidden for n in range(1, len(own) + 1) for hidden in itertools.combinations(own, n)):
            logits = naive_logits(model, image, whole, size, hidden)
            own_log_prob = logits.log_softmax(1)[range(len(hidden)), whole[0, list(hidden)]]
            given[hidden] = dict(zip(hidden, own_log_prob.tolist(), strict=True))
        totals = torch.tensor([sum(given[tuple(sorted(order[k:]))][p] for k, p in enumerate(order))
                               for order in itertools.permutations(own)], dtype=torch.float64)
        mean += totals.mean().item()
        likelihood += totals.logsumexp(0).item() - math.log(len(totals))
    return mean, likelihood


@pytest.mark.parametrize("size", [1, 3, 5])
def test_monte_carlo_within_blocks_meets_the_bound_by_enumeration_and_is_unbiased_with_few_draws(size):
    model, image, text = blocks(size), images(2), SIX
    with torch.inference_mode():
        found = model.log_likelihood(image, text, "monte_carlo", return_details=True)
        exact = torch.tensor([[over_orders(model, image[b:b + 1], text[b, c:c + 1], size) for c in range(3)]
                              for b in range(2)])
        assert torch.allclose(found.log_likelihood, exact[..., 0], atol=2e-5)
        assert (found.standard_error < 1e-5).all() and (found.draws < 2 ** size).all()
        assert (found.log_likelihood <= exact[..., 1] + 2e-5).all()
        if size == 1:
            assert torch.allclose(found.log_likelihood, model.log_likelihood(image, text), atol=2e-5)
            return
        assert (found.log_likelihood < exact[..., 1] - 1e-3).any()
        few = [model.log_likelihood(image, text, "monte_carlo", num_samples=size, seed=seed, return_details=True)
               for seed in range(60)]
    scores, errors = (torch.stack([getattr(x, name) for x in few]) for name in ("log_likelihood", "standard_error"))
    assert ((scores.mean(0) - exact[..., 0]).abs() < 4 * scores.std(0) / 60 ** 0.5 + 1e-4).all()
    assert (errors.mean(0) > 0.7 * scores.std(0)).all() and (scores.std(0) > 0.01).any()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_captions_are_decoded_block_by_block_as_by_a_naive_loop_without_a_cache(size):
    model, image = blocks(size, seed=2), images(4)
    model.text.output.weight.data[eot_id(VOCAB)] *= 1.5  # so that captions end
    found = model.generate(image, return_trace=True)
    assert len(set(caption_lengths(found.text, VOCAB).tolist())) > 1
    for b in range(4):
        text = torch.full((1, 12), mask_id(VOCAB))
        text[0, 0], text[0, 11] = VOCAB - 2, eot_id(VOCAB)
        steps, log_probs = torch.full((12,), -1), torch.zeros(12)
        for start in range(0, 12, size):
            hidden = list(range(max(start, 1), min(start + size, 11)))
            shown = by_confidence(model, image[b:b + 1], text, size, hidden, write=True)
            for step, (place, log_prob) in enumerate(shown, start):
                steps[place], log_probs[place] = step, log_prob
            if (text[0, start:start + size] == eot_id(VOCAB)).any():
                break
        n = int(caption_lengths(text, VOCAB))
        assert found.text[b, :n].tolist() == text[0, :n].tolist() and (found.text[b, n:] == 0).all()
        assert found.step[b, :n].tolist() == steps[:n].tolist()
        assert torch.allclose(found.log_prob[b, :n], log_probs[:n], atol=2e-5)


def test_gaps_are_filled_whatever_the_other_texts_are():
    model, image = blocks(4), images(3)
    text = captions([7]).index_fill(1, torch.tensor([2, 4, 5]), mask_id(VOCAB))
    found = model.generate(image, text=text, return_trace=True, repeats="avoid")
    gaps = (text == mask_id(VOCAB))[:, :7].expand(3, -1)
    assert torch.equal(found.text != text[:, :7], gaps) and torch.equal(found.step >= 0, gaps)
    assert (caption_lengths(found.text, VOCAB) == 7).all()
    assert (caption_lengths(model.generate(image, length=5), VOCAB) <= 7).all()
    beside = model.generate(images(2), text=torch.cat((text, captions([12]))), return_trace=True)
    assert torch.allclose(beside.log_prob[0, :7], found.log_prob[0, :7])


def test_samples_and_guidance_are_those_of_each_image():
    model, image = blocks(3, seed=2), images(3)
    null = model.encode_image_tokens(images(32, seed=5)).mean(0)
    assert torch.equal(model.generate(image, guidance_scale=1.0), model.generate(image))
    strong = model.generate(image, guidance_scale=4.0, blind=null)
    alone = [model.generate(one, guidance_scale=4.0, blind=null)[0] for one in image.split(1)]
    assert all(torch.equal(row[row != 0], one[one != 0]) for row, one in zip(strong, alone, strict=True))
    ignoring = model.generate(image, guidance_scale=0.0, blind=null)
    assert (ignoring == ignoring[0]).all()
    drawn = model.generate(image, samples=5, sampling=Sampling(1.0, generator=seeded(0)))
    assert len(drawn) == 15 and len(drawn.unique(dim=0)) > 10


def test_the_commands_take_a_model_of_blocks_and_what_needs_whole_captions_says_so(here, photos):
    run_folder(here / "run", "MDC-ViT-Ti-8-b4")
    Path("captions.txt").write_text("a star\na red circle left of a blue square\nred\n")
    for flags in ((), ("--length 6 --tokens-per-step 2",),
                  ("--samples 3 --select consensus --temperature 0.7",),
                  ("--text", "a [MASK] star"), ("--sampler beam --length 6 --min-length 2",)):
        assert not complaint_of("caption", "--pretrained run", *photos, "--out c.jsonl", *flags), flags
        assert len(Path("c.jsonl").read_text().splitlines()) == 3
        Path("c.jsonl").unlink()
    assert not complaint_of("score", "--pretrained run --images", *photos,
                            "--captions captions.txt --plain --out s.jsonl --workers 0")
    with pytest.raises(ValueError, match="block by block"):
        blocks(4).logits(torch.zeros(1, 3, 32, 32), captions([5]))
