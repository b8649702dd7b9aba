"""Claims about reconstructions: only the caption's tokens are shown, by untrained models too."""
import pytest
from conftest import captions, images, tiny_captioner
from PIL import Image

from experiments import reconstruct as tool
from experiments.reconstruct import reconstruct
from open_clip_mdc import unregister
from open_clip_mdc.text.special_tokens import eot_id, mask_id, valid_tokens


def test_behind_the_captions_tokens_there_is_only_its_end_though_the_model_gives_none():
    model = tiny_captioner()
    model.text.output.weight.data[eot_id(model.vocab_size)] = 0  # against logits of either sign: never the greatest
    text = captions([3, 12, 7])
    found = reconstruct(model, images(3), text)
    valid = valid_tokens(text, model.vocab_size)
    assert (found[:, 0] == text[:, 0]).all() and (found[valid] != mask_id(model.vocab_size)).all()
    assert (found[valid] != eot_id(model.vocab_size)).all() and (found[~valid] == eot_id(model.vocab_size)).all()


@pytest.mark.parametrize("objective", ["mdc", "arc"])
def test_the_command_prints_the_loss_and_the_captions_and_writes_the_sheet(runs, scenes, tmp_path, capsys, objective):
    tool.main(["--pretrained", str(runs / objective), "--data", str(scenes / "val" / "00000.tar"),
                "--device", "cpu", "--num-samples", "3", "--out", str(tmp_path / "sheet.png")])
    unregister()
    printed = capsys.readouterr().out
    assert "on 64 held-out captions" in printed and "nats per caption" in printed and "3. " in printed
    assert Image.open(tmp_path / "sheet.png").format == "PNG"
