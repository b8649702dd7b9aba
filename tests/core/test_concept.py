"""Claims about hidden concept words."""
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import complaint_of, make_image, seeded
from training import losses, open_clip_train

import open_clip_mdc
from clip_benchmark_ext.flags import Flags, scoring_options
from open_clip_mdc.objectives import OBJECTIVES, CaptionCfg

SAID = {"a red circle left of a blue square": {"red", "circle", "left", "blue", "square"},
        "a green star up above a blue circle": {"green", "star", "blue", "circle"},
        "a of a": {"a", "of", ""}}  # EOT, too


@pytest.mark.parametrize("name", ["Concept-ViT-Ti-8", "ViT-B-32"])
def test_words_that_name_something_are_hidden_and_no_others(name):
    """Both of a cut vocabulary, of which a model says the file, and of CLIP's."""
    open_clip_mdc.register()
    cfg, tokenizer = CaptionCfg(objective="concept"), open_clip.get_tokenizer(name)
    if name.startswith("Concept"):
        cfg = open_clip.create_model(name).caption_cfg
        assert cfg.bpe_path
    text, u = tokenizer(list(SAID)), torch.ones(3, dtype=torch.float64)

    def corrupt(text, u, seed):
        return OBJECTIVES["concept"].corrupt(text, tokenizer.vocab_size, cfg, u, seeded(seed))

    noised = corrupt(text, u, 0)
    for ids, mask, words in zip(text, noised.loss_mask, SAID.values(), strict=True):
        assert {tokenizer.decode([x]).replace("<end_of_text>", "").strip() for x in ids[mask].tolist()} == words
    assert torch.equal(noised.target, noised.loss_mask)
    some = [corrupt(text, u / 2, seed) for seed in range(800)]
    # t is 0.75, so the expected weight of a concept word is 0.75 * 1 / 0.75.
    weight = torch.stack([x.weight for x in some]).mean(0)
    assert some[0].t.tolist() == [0.75] * 3 and ((weight - noised.target.float()).abs() < 0.1).all()


def test_it_trains_fills_in_words_and_refuses_whole_captions_in_one_line(csv, here):
    open_clip_train("--batch-size", "12", "--epochs", "1", "--val-data", csv, data=csv, logs=here,
                    model="Concept-ViT-Ti-8")
    assert len(losses(here)) == 4
    make_image(0, 32).save("0.png")
    assert not complaint_of("caption", "0.png", "--pretrained", "run", "--text", "a [MASK] circle", "--out", "c.jsonl")
    assert '"caption": "a ' in Path("c.jsonl").read_text()
    with pytest.raises(ValueError, match="no --scorer"):
        scoring_options(None, Flags(), CaptionCfg(objective="concept"))
