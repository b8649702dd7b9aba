"""Claims about the model card of `open_clip_mdc export`."""

import pytest
from conftest import write_json

from open_clip_mdc.cli.model_card import result_rows, training_flags


def test_the_card_tells_no_place_no_address_and_no_command(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "params.txt").write_text("".join(f"{name}: {value}\n" for name, value in {
        "model": "MDC-ViT-Ti-8", "pretrained": "/home/alice/secret/vq.pt", "lr": 0.0007,
        "imagenet_val": "/home/alice/imagenet/val", "imagenet_v2": "/home/alice/imagenet", "val_data": "https://me:word@host/{0..9}.tar?Signature=SECRET",
        "train_data": "pipe:fetch --key SECRET", "opt": "lion",
        "cache_dir": "/home/alice/cache", "dist_url": "tcp://10.0.0.7:1234", "dist_backend": "gloo",
        "distill_pretrained": "s3://secret/alice/clip.pt"}.items()))
    assert training_flags(str(tmp_path / "checkpoints/epoch_1.pt")) == {"lr": "0.0007", "opt": "lion"}


@pytest.mark.parametrize("value, told", [(23937, "23937"), (0.51234, "0.5123"), (12345678, "12345678"), (2.0, "2")])
def test_counts_are_told_whole_and_measurements_by_four_digits(tmp_path, value, told):
    path = tmp_path / "result.json"
    write_json(path, {"dataset": "x", "task": "y", "metrics": {"m": value}})
    assert result_rows([str(path)]) == [["x", "y", "m", told]]
