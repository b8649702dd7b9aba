"""Claims about the model card of `open_clip_mdc export`.    pytest tests/tools/test_model_card.py"""
import json

import pytest

from open_clip_mdc.cli.model_card import data_name, result_rows, training_flags

PRESIGNED = "https://me:word@host:8080/a/cc12m/{0..9}.tar?X-Amz-Signature=SECRET#SECRET"


@pytest.mark.parametrize("given, told", [
    ("scenes/train/{0..7}.tar", "scenes/train/{0..7}.tar"), ("/home/somebody/cc3m/0.tar", "cc3m/0.tar"),
    ("/home/somebody/0.tar", "0.tar"), ("../somebody/x/cc3m/0.tar", "cc3m/0.tar"), ("~/x/cc3m/0.tar", "cc3m/0.tar"),
    ("file:/data/me/cc3m/0.tar", "cc3m/0.tar"), ("file:///data/me/cc3m/0.tar", "cc3m/0.tar"),
    ("/data/me/cc12m/{0..9}.tar::/data/me/recap/{0..9}.tar", "cc12m/{0..9}.tar::recap/{0..9}.tar"),
    ("/data/me/{cc3m/{0..3},recap/{0..9}}.tar", "cc3m/*.tar::recap/*.tar"),
    (PRESIGNED, "cc12m/{0..9}.tar"), (f"/data/me/cc3m/0.tar::{PRESIGNED}", "cc3m/0.tar::cc12m/{0..9}.tar"),
    ("https://me:word@host/0.tar", "host/0.tar"),
    ("pipe:curl -H 'Authorization: secret' https://host/cc3m/0.tar", "cc3m/0.tar"),
    (f"pipe:curl -s -x http://me:SECRET@proxy:1 '{PRESIGNED}' -H 'Authorization: Bearer SECRET'", "cc12m/{0..9}.tar"),
    ("pipe:curl --oauth2-bearer SEC/RET --url=https://host/cc3m/0.tar", "cc3m/0.tar"),
    ("pipe:curl https://host/cc3m/0.tar -H X::SECRET", "cc3m/0.tar"),
    ("pipe:aws s3 cp s3://bucket/cc3m/{0..9}.tar -::pipe:cat /data/me/recap/{0..9}.tar",
     "cc3m/{0..9}.tar::recap/{0..9}.tar"),
    ("pipe:curl https://host/api/fetch?key=SECRET", "api/fetch"), ("pipe:fetch --key SEC/RET", "a command")])
def test_the_card_names_the_data_and_neither_the_machine_nor_its_keys(given, told):
    assert data_name(given) == told


def test_the_card_tells_files_of_flags_by_their_names(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "params.txt").write_text("".join(f"{name}: {value}\n" for name, value in {
        "model": "MDC-ViT-Ti-8", "pretrained": "/home/alice/secret/vq.pt", "lr": 0.0007,
        "imagenet_val": "/home/alice/imagenet/val", "imagenet_v2": "/home/alice/imagenet", "val_data": PRESIGNED,
        "cache_dir": "/home/alice/cache", "dist_url": "tcp://10.0.0.7:1234", "dist_backend": "gloo",
        "distill_pretrained": "s3://secret/alice/clip.pt", "opt": "timm/lion"}.items()))
    assert training_flags(str(tmp_path / "checkpoints" / "epoch_1.pt")) == {
        "pretrained": "vq.pt", "lr": "0.0007", "val_data": "cc12m/{0..9}.tar",
        "distill_pretrained": "clip.pt", "opt": "timm/lion"}


@pytest.mark.parametrize("value, told", [(23937, "23937"), (0.51234, "0.5123"), (12345678, "12345678"), (2.0, "2")])
def test_counts_are_told_whole_and_measurements_by_four_digits(tmp_path, value, told):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"dataset": "x", "task": "y", "metrics": {"m": value}}))
    assert result_rows([str(path)]) == [["x", "y", "m", told]]
