"""Claims about captions and scores, from the weights file alone: the decoder in NumPy, float64, a token at a time.

The oracle knows the file of the packaged captioner, the paper's equations, and what the public calls return. It shares
no code with the package. It gets the patch tokens from the model, as the image encoder is timm's.

Dimensions: P patches, L positions, D image width, W decoder width, H heads, V vocabulary.
"""
from pathlib import Path

import numpy as np
import pytest
import sklearn
from conftest import REPO
from safetensors.numpy import load_file
from scipy.special import erf, log_softmax, softmax

import open_clip_mdc

PHOTOS = [Path(sklearn.__file__).parent / "datasets/images" / name for name in ("flower.jpg", "china.jpg")]
HEADS, LAYERS = 3, 3  # as its open_clip_config.json says
CAPTIONS = ["a dog is running through the grass .", "a purple flower in a garden .", "two people standing by a temple",
            "people ."]


def norm(x, weights, name):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def attend(q, k, v):
    """Softmax attention of queries [L, W] to keys and values [K, W], head by head."""
    return np.concatenate([softmax(qh @ kh.T / np.sqrt(qh.shape[-1]), -1) @ vh for qh, kh, vh in zip(
        *(np.split(x, HEADS, -1) for x in (q, k, v)), strict=True)], -1)


def gelu(x):
    return x * (1 + erf(x / 2 ** 0.5)) / 2


def log_probs(weights, ids, patches):
    """log p [L, V] of every position of one text, ids [L], given patch tokens [P, D] (Sec. 3.2)."""
    x = weights["text.token_embedding.weight"][ids] + weights["text.positional_embedding"][:len(ids)]
    for i in range(LAYERS):
        block = f"text.blocks.{i}"
        y = attend(*np.split(linear(norm(x, weights, f"{block}.ln_1"), weights, f"{block}.self_qkv"), 3, -1))
        x = x + linear(y, weights, f"{block}.self_out")
        k, v = np.split(linear(patches, weights, f"{block}.cross_kv"), 2, -1)
        y = attend(linear(norm(x, weights, f"{block}.ln_2"), weights, f"{block}.cross_q"), k, v)
        x = x + linear(y, weights, f"{block}.cross_out")
        y = gelu(linear(norm(x, weights, f"{block}.ln_3"), weights, f"{block}.mlp.c_fc"))
        x = x + linear(y, weights, f"{block}.mlp.c_proj")
    return log_softmax(norm(x, weights, "text.ln_final") @ weights["text.output.weight"].T, -1)


def most_confident(masked, log_p):
    return np.where(masked, log_p.max(-1), -np.inf).argmax()


@pytest.fixture(scope="module")
def loaded():
    return open_clip_mdc.load("photo", device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def weights():
    file = REPO / "model_configs/photo/open_clip_model.safetensors"
    return {name: x.astype("float64") for name, x in load_file(file).items()}


@pytest.fixture(scope="module")
def patches(loaded):
    return loaded.encode_image_tokens(PHOTOS).double().numpy()


def test_the_heuristic_score_is_the_chain_by_hand(loaded, weights, patches):
    mask = len(weights["text.output.weight"])
    scores = loaded.score(PHOTOS, CAPTIONS)
    for image, own in zip(patches, scores.tolist(), strict=True):
        for caption, score in zip(CAPTIONS, own, strict=True):
            ids = np.array(loaded.tokenizer.encode(caption))
            truth = np.array([mask - 2, *ids, mask - 1])  # SOT, words, EOT: the last two ids of the vocabulary
            text, total = np.where(np.arange(len(truth)) == 0, truth, mask), 0.0
            while (text == mask).any():  # reveal the place whose best token is most probable (Sec. 4.2)
                log_p = log_probs(weights, text, image)
                place = most_confident(text == mask, log_p)
                total += log_p[place, truth[place]]
                text[place] = truth[place]
            assert score == pytest.approx(total, abs=1e-3)
    assert scores.argmax(1).tolist() != [0, 0] and np.ptp(scores.numpy()) > 10  # they do tell captions apart


@pytest.mark.parametrize("length", [6, 11])
def test_a_caption_is_decoded_as_by_hand(loaded, weights, patches, length):
    mask = len(weights["text.output.weight"])
    rows = loaded.trace(PHOTOS, length=length, repeats="allow")
    for image, row in zip(patches, rows, strict=True):
        text = np.array([mask - 2, *[mask] * length, mask - 1])  # SOT and EOT are given
        words = []
        for step in range(length):  # Eq. 6: the most confident token of all masked places first
            log_p = log_probs(weights, text, image)
            log_p[:, mask - 2:] = -np.inf
            place = most_confident(text == mask, log_p)
            text[place] = log_p[place].argmax()
            words.append((place, step, log_p[place].max()))
        assert row["caption"] == loaded.tokenizer.decode(text[1:-1].tolist()).strip()
        for token, (_, step, log_p) in zip(row["tokens"], sorted(words), strict=True):
            assert token["step"] == step and token["log_prob"] == pytest.approx(log_p, abs=1e-3)
