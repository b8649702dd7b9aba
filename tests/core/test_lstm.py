"""Claims about the LSTM decoder of Show and Tell."""
import itertools
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import (
    VISION,
    VOCAB,
    captions,
    complaint_of,
    images,
    json_lines,
    read_json,
    refused,
    run,
    seeded,
    tiny_captioner,
    write_json,
)
from training import equal, losses, open_clip_train, weights

import open_clip_mdc
from open_clip_mdc.decoding.options import Sampling
from open_clip_mdc.integration.factory import OpenCLIPCaptioner
from open_clip_mdc.text.special_tokens import eot_id, sot_id, target_tokens

MODEL = "ARC-ViT-Ti-8-lstm"


def captioner():
    """An LSTM to which the image matters."""
    model = tiny_captioner("arc", decoder="lstm")
    torch.nn.init.normal_(model.text.image_embedding.weight)
    return model


def by_cells(model, image, text):
    """Logits [B, L, V]: a cell of torch, one token after another. The image's mean patch token is the first input."""
    decoder = model.text
    cell = torch.nn.LSTMCell(32, 32)
    cell.load_state_dict({name.removesuffix("_l0"): x for name, x in decoder.blocks[0].state_dict().items()})
    state = cell(decoder.image_embedding(model.encode_image(image)))
    logits = []
    for token in text.T:
        state = cell(decoder.token_embedding(token), state)
        logits.append(state[0] @ decoder.output.weight.T)
    return torch.stack(logits, 1)


def test_logits_and_losses_are_those_of_a_loop_over_cells():
    model, text, image = captioner(), captions([5, 9, 12]), images(3)
    with torch.no_grad():
        expected = by_cells(model, image, text)
        assert torch.allclose(model.logits(image, text), expected, atol=1e-5)
        assert not torch.allclose(expected[:, 0], by_cells(model, images(3, seed=1), text)[:, 0], atol=0.01)
        answers = expected[:, :-1].log_softmax(2).gather(2, text[:, 1:, None])[..., 0]
        nll = -answers[target_tokens(text, VOCAB)[:, 1:]]
        assert torch.allclose(model(image, text)["token_nll"], nll, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            found = model.train()(image, text)["token_nll"]
            assert torch.allclose(found, nll, atol=0.1) and not torch.equal(found, nll)


@pytest.mark.parametrize("options", [{"num_beams": 1}, {}, {"num_beams": 3, "min_length": 4, "length": 5},
                                     {"samples": 4}], ids=str)
def test_captions_written_step_by_step_have_the_likelihood_of_one_pass(options):
    model, image, samples = captioner(), images(3), options.get("samples", 1)
    sampling = Sampling(float(samples > 1), generator=seeded(0))
    found = model.generate(image, return_trace=True, sampling=sampling, **options)
    exact = model.log_likelihood(image, found.text.view(3, samples, -1))
    assert torch.allclose(found.log_prob.sum(1).view_as(exact), exact, atol=1e-4)
    assert samples == 1 or len(found.text.unique(dim=0)) > 4
    if not options:
        assert (exact[:, 0] >= model.log_likelihood(image, model.generate(image, num_beams=1)) - 1e-5).all()


def test_the_probabilities_of_all_captions_add_up_to_one():
    """With a vocabulary of 6 and room for 3 words. Those that go on are summed without their end."""
    torch.manual_seed(0)
    model = OpenCLIPCaptioner(64, VISION, dict(context_length=5, vocab_size=6, width=16, heads=2, layers=1),
                              dict(objective="arc", decoder="lstm")).eval()
    torch.nn.init.normal_(model.text.output.weight)
    every = [words for n in range(4) for words in itertools.product(range(5), repeat=n)]
    text = torch.tensor([[sot_id(6), *words, eot_id(6), *[0] * (3 - len(words))] for words in every])
    found = model.log_likelihood(images(2), text.expand(2, -1, -1), return_details=True)
    longest = torch.tensor([len(words) == 3 for words in every])
    end = torch.where(longest, found.token_log_likelihood[..., 4], 0)
    assert torch.allclose((found.log_likelihood - end).exp().sum(1), torch.ones(2), atol=1e-5)
    model.text.context_length = model.context_length = 6  # room to find the best of them
    best = model.generate(images(2), length=3, num_beams=125)
    assert best.tolist() == [row[:best.shape[1]].tolist() for row in text[found.log_likelihood.argmax(1)]]


def test_it_trains_by_the_command_resumes_to_the_bit_and_serves_all_tools(scenes, csv, here, photos):
    """With OpenCLIP's default precision and a worker."""
    flags = "--epochs 2 --precision amp --workers 1 --val-data", csv
    open_clip_train(*flags, data=csv, logs=here, model=MODEL)
    found = losses(here)
    assert len(found) == 8 and found[-1] < found[0] - 0.2
    open_clip_train(*flags, "--resume run/checkpoints/epoch_1.pt", data=csv, logs=here, model=MODEL, name="resumed")
    assert equal(weights(here, 2), weights(here, 2, "resumed"))
    Path("said.txt").write_text("a red circle\na blue square\na red star\n")
    for number, given in enumerate(("", "--min-length 3", "--temperature 1 --top-k 5")):
        assert not complaint_of("caption", *photos, *f"--pretrained run --out {number}.jsonl {given}".split())
        assert len(json_lines(f"{number}.jsonl")) == 3
    for command in ("score --images 0.png --captions said.txt --pretrained run --out s.jsonl --workers 0 --plain",
                    "export --pretrained run --out out --to open_clip timm"):
        assert not complaint_of(*command.split())
    again, model = open_clip_mdc.load("out"), open_clip_mdc.load("run")
    assert again.caption(photos) == model.caption(photos)
    run(*f"python -m clip_benchmark_ext.cli eval --model {MODEL} --pretrained run --dataset wds/probe --dataset_root "
        f"{scenes}/probe --task linear_probe --no_amp --num_workers 0 --output probe.json".split(), fork=True)
    assert 0 <= read_json("probe.json")["metrics"]["lp_acc1"] <= 1


def test_what_an_lstm_cannot_do_is_refused_in_one_line(csv, here):
    for objective in ("mdc", "mix", "block-diffusion", "concept"):
        assert "'lstm' reads from left to right" in refused(ValueError, tiny_captioner, objective, decoder="lstm")
    assert "decoder is 'gru'" in refused(ValueError, tiny_captioner, "arc", decoder="gru")
    for objective in ("bicap", "prefix", "cappa"):
        model = tiny_captioner(objective, decoder="lstm")
        assert "from left to right only" in refused(ValueError, model, images(3), captions([5, 9, 12]))
    write_json("rows.json", {"rows": {"L-*": {"extends": "Prefix-*", "decoder": "lstm"}}})
    Path("rows.py").write_text("")
    said = open_clip_train("--plugin rows.py", data=csv, logs=here, model="L-ViT-Ti-8", check=False)
    assert said.returncode and said.stderr.strip().splitlines()[-1].startswith("error: an LSTM reads")
    assert open_clip.get_model_config("MDC-ViT-Ti-8-lstm") is None
