"""Claims about learning curves and the rich scales."""
from helpers import page_of, write_result

from experiments.tables import curves
from experiments.tables.scales import RICH


def test_images_until_swapped_attributes_are_told_apart_by_hand(tmp_path):
    never = [0.5] * 8
    accuracies = {"MDC": ([0.5, 0.5, 0.6, 0.85, 0.92, 0.89, 0.95, 0.96], [0.5, 0.5, 0.9], [0.5, 0.92, 0.2, 0.1]),
                  "ARC": ([0.5, 0.91], [0.2, 0.93]), "CLIP": (never, never), "CapPa": (never, [0.5] * 7 + [0.9])}
    for objective, by_seed in accuracies.items():
        for seed, values in enumerate(by_seed):
            for epoch, value in enumerate(values, 1):
                run = f"{curves.OBJECTIVES[objective]}ViT-Ti-8-rich--short--s{seed}"
                write_result(tmp_path, "image_caption_selection", run, "sugar_crepe/swap_att", epoch, text_acc=value)
    write_result(tmp_path, "image_caption_selection", "ARC-ViT-Ti-8-rich--short--s7", "sugar_crepe/swap_att", 8,
                 text_acc=1.0)  # Table 2's alone: when it got there is not known
    page = page_of(tmp_path, "curves", RICH)
    assert "| MDC, 5/8 | **92.0** |" in page and "| ARC, 1/4 | **92.0 ± 1.4** |" in page
    for line in ("| ARC | 40,000 |", "| MDC | 40,000 to 100,000 |", "| CLIP | > 160,000 |",
                 "| CapPa | 160,000 to > 160,000 |"):
        assert line in page, page
    assert "| MCD |" not in page and "160,000 images, 5,000 steps of 32" in page
