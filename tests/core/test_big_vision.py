"""Claims about encoders in big_vision's layout, CapPa's among them."""
import numpy as np
import pytest
import timm
import torch
from conftest import images, refused

import open_clip_mdc
from open_clip_mdc.data import weights
from open_clip_mdc.integration import image_source
from open_clip_mdc.models.foreign import big_vision

D, HEADS, BLOCKS, PATCH, SIZE = 192, 3, 12, 16, 32
NAME = "vit_tiny_patch16_224"


def arrays(prefix: str, scanned: bool) -> dict[str, np.ndarray]:
    """Random arrays of a ViT without class token, with the shapes that flax gives them."""
    rng = np.random.default_rng(0)

    def x(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float32)

    attention, norm = "MultiHeadDotProductAttention_0/", ("LayerNorm_0", "LayerNorm_1")
    blocks = [{f"{name}/{what}": x(D) for name in norm for what in ("scale", "bias")} | {
        f"{attention}{name}/{what}": x(*shape) for name in ("query", "key", "value")
        for what, shape in (("kernel", (D, HEADS, D // HEADS)), ("bias", (HEADS, D // HEADS)))} | {
        f"{attention}out/kernel": x(HEADS, D // HEADS, D), f"{attention}out/bias": x(D),
        "MlpBlock_0/Dense_0/kernel": x(D, 4 * D), "MlpBlock_0/Dense_0/bias": x(4 * D),
        "MlpBlock_0/Dense_1/kernel": x(4 * D, D), "MlpBlock_0/Dense_1/bias": x(D)} for _ in range(BLOCKS)]
    found = {"embedding/kernel": x(PATCH, PATCH, 3, D), "embedding/bias": x(D),
             "pos_embedding": x(1, (SIZE // PATCH) ** 2, D), "Transformer/encoder_norm/scale": x(D),
             "Transformer/encoder_norm/bias": x(D)}
    if scanned:
        found |= {f"Transformer/encoderblock/{name}": np.stack([block[name] for block in blocks]) for name in blocks[0]}
    else:
        found |= {f"Transformer/encoderblock_{i}/{name}": value for i, block in enumerate(blocks)
                  for name, value in block.items()}
    others = {"params/decoder/EncDecBlock0/LayerNorm1/scale": x(D), "params/pos_embedding_decoder": x(1, 8, D)}
    return {f"{prefix}{name}": value for name, value in found.items()} | others


@pytest.mark.parametrize("prefix", ["params/encoder/", "params/img/"])
@pytest.mark.parametrize("scanned", [False, True])
def test_the_tokens_are_those_of_timms_own_reader(prefix, scanned, tmp_path):
    """CapPa's prefix and SigLIP's, a network whose blocks are arrays of their own, and one that was scanned."""
    path = tmp_path / "encoder.npz"
    np.savez(path, **arrays(prefix, scanned))
    np.savez(tmp_path / "bare.npz", **arrays("", scanned=False))
    options = dict(num_classes=0, class_token=False, global_pool="avg", fc_norm=False, img_size=SIZE)
    theirs, ours = (timm.create_model(NAME, **options).eval() for _ in range(2))
    theirs.load_pretrained(str(tmp_path / "bare.npz"))
    ours.load_state_dict(big_vision.to_timm(weights.tensors(path)))
    image = images(2, SIZE)
    with torch.no_grad():
        assert torch.equal(ours.forward_features(image), theirs.forward_features(image))
    found = image_source.locate(str(path))
    assert found.normalization["mean"] == found.normalization["std"] == [0.5] * 3
    assert found.traits["eps of LayerNorm"] == ours.norm.eps


def test_another_network_and_arrays_that_are_objects_are_refused_in_a_line(tmp_path):
    path = tmp_path / "encoder.npz"
    np.savez(path, **arrays("params/encoder/", False))
    assert "not fit the image tower of MDC-timm-test_vit: its pos_embed is" in refused(
        ValueError, open_clip_mdc.create_model_and_transforms, "MDC-timm-test_vit", pretrained_image=path,
        force_image_size=SIZE)
    np.savez(path, **{"params/encoder/Transformer/encoderblock_0/x": np.array([{"a": 1}], dtype=object)})
    assert "holds other arrays than weights" in refused(ValueError, weights.tensors, path)
