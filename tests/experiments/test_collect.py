"""Claims about collect.py: hand-made results give the hand-computed tables."""
import csv
import math

import pytest
from conftest import write_json
from helpers import leave_recipe, page_of, place, write_result

from experiments import run as runner
from experiments.report import collect
from experiments.report.results import loss_variation, read_results, values
from experiments.tables import scales
from experiments.tables.paper_tables import TABLES, Run


def test_hand_written_results_give_the_hand_computed_table(tmp_path):
    for seed, (wide, narrow) in enumerate(((0.50, 0.60), (0.54, 0.62), (0.55, 0.70))):
        write_result(tmp_path, "linear_probe", f"MDC-ViT-Ti-8-t0.0-1.0--short--s{seed}", "wds/probe", lp_acc1=wide)
        write_result(tmp_path, "linear_probe", f"MDC-ViT-Ti-8--short--s{seed}", "wds/probe", lp_acc1=narrow)
    write_result(tmp_path, "linear_probe", "MDC-ViT-Ti-8-t0.4-0.9--short--s0", "wds/probe", lp_acc1=0.58)
    page = page_of(tmp_path, "table5")
    # 50, 54, 55: mean 53, squares 9 + 1 + 4 = 14, variance 7; 60, 62, 70: mean 64, squares 16 + 4 + 36, variance 28
    assert f"| [0.0, 1.0] | 53.0 ± {math.sqrt(7):.1f} |" in page
    assert "| [0.4, 0.9] | *58.0* |" in page
    assert f"| [0.5, 1.0] | **64.0 ± {math.sqrt(28):.1f}** |" in page
    assert "Not run: [0.3, 0.8].\n" in page and "| [0.3, 0.8]" not in page
    assert "Seeds: 1 to 3" in page and page == (tmp_path / "tables/table5.md").read_text()
    rows = {row["row"]: row for row in csv.DictReader((tmp_path / "tables/table5.csv").open())}
    assert float(rows["[0.0, 1.0]"]["mean"]) == pytest.approx(53) and rows["[0.0, 1.0]"]["seeds"] == "3"
    assert float(rows["[0.5, 1.0]"]["std"]) == pytest.approx(math.sqrt(28)) and rows["[0.3, 0.8]"]["mean"] == ""


def test_averages_of_a_group_say_which_they_are(tmp_path):
    kind = "image_caption_selection"
    for subset, accuracy, cases in (("att", 0.7, 300), ("obj", 0.5, 100)):
        write_result(tmp_path, kind, "ViT-B-32--cc12m--s0", f"sugar_crepe/swap_{subset}", 32, text_acc=accuracy,
                     cases=cases)
    write_result(tmp_path, kind, "ViT-B-32--cc12m--s0", "aro/vg_relation", 32, text_acc=0.6, text_acc_macro=0.6,
                 text_acc_micro=0.7)
    page = page_of(tmp_path, "table2", scales.PAPER)
    columns, clip = ([cell.strip() for cell in line.split("|")] for line in page.splitlines()[0:3:2])
    row = dict(zip(columns, clip, strict=True))
    assert row["SugarCrepe swap, micro"] == "**65.0** [61.3]" and row["SugarCrepe swap, macro"] == "**60.0**"
    assert row["ARO relation, macro"] == "**60.0** [53.6]" and row["ARO relation, micro"] == "**70.0**"


def test_rows_and_columns_of_which_there_is_nothing_are_named_below(tmp_path):
    write_result(tmp_path, "captioning", "ARC-ViT-Ti-8--short-e4--s0", "wds/captions", epoch=4, Bleu_4=0.5,
                 METEOR=0.4, CIDEr=1.0, ROUGE_L=0.5, mean_length=8.0)
    page = page_of(tmp_path, "table3")
    assert "Not measured: SPICE, LLM" in page and "SPICE" not in page.splitlines()[0]
    write_json(tmp_path / "results/judge/scenes--s0.json",
               {"selection_rate": {"ARC": 0.75, "MDC-8": 0.25}, "judged": 40})
    page = page_of(tmp_path, "table3")
    assert "Not measured: SPICE. Not run: " in page
    cells = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    assert [row[1::cells[0].index("LLM") - 1] for row in cells[2:4]] == \
        [["scenes, ARC", "**75.0**"], ["scenes, MDC-8", "25.0"]]
    assert cells[3][cells[0].index("CIDEr")] == "missing"
    assert "Not run: scenes, MDC-10; scenes, MDC-auto.\n" in page


def test_another_checkpoint_of_a_run_neither_hides_nor_replaces_its_result(tmp_path):
    name = "MDC-ViT-Ti-8--short--s0"
    write_result(tmp_path, "linear_probe", name, "wds/probe", epoch=1, lp_acc1=0.5)
    other = write_result(tmp_path, "linear_probe", name, "wds/probe", epoch=2, lp_acc1=0.9)
    assert "| [0.5, 1.0] | **50.0** |" in page_of(tmp_path, "table5")
    longer = scales.SCENES._replace(epochs=2)
    assert "| [0.5, 1.0] | **90.0** |" in page_of(tmp_path, "table5", longer)
    copy = other.with_name("copy.json")
    copy.write_text(other.read_text())
    with pytest.raises(ValueError, match="are results of the same run"):
        page_of(tmp_path, "table5")


def test_results_of_another_recipe_do_not_enter_a_table(tmp_path):
    run = Run("MDC-ViT-Ti-8", "short")
    write_result(tmp_path, "linear_probe", run.name(0), "wds/probe", lp_acc1=0.5)
    leave_recipe(tmp_path, scales.SCENES._replace(epochs=3), run)
    with pytest.raises(ValueError, match=r"such as MDC-ViT-Ti-8--short--s0 \(3, now 1\)"):
        page_of(tmp_path, "table5")


def test_stability_is_the_noise_of_the_logged_loss_around_a_slow_trend(tmp_path):
    noise = [1.0, -1.0] * 20
    lines = [f"... Train Epoch: 0 [{i:>2}/99 (3%)] Caption_loss: {20 - 0.01 * i + n:.5f} (7.0) Loss: 99 (9)"
             for i, n in enumerate(noise)]
    # successive differences are 2 but for the trend: 2 / sqrt(2) = 1.414 of a mean of about 20 - 0.3
    found = loss_variation("\n".join(lines))
    assert found["variation"] == pytest.approx(math.sqrt(2) / 19.7, rel=0.01)
    assert found["log_variation"] == math.log(found["variation"])
    resumed = [*lines[:25], *lines[10:33], *lines[30:]]  # killed twice, and begun again from an earlier step
    assert loss_variation("\n".join(resumed)) == loss_variation("\n".join(lines))
    assert all(map(math.isnan, loss_variation("no line").values()))
    folder = leave_recipe(tmp_path, scales.SCENES, Run("MDC-ViT-Ti-8-t0.0-1.0", "short"))
    (folder / "out.log").write_text("\n".join(lines))
    page = page_of(tmp_path, "stability")
    assert "| [0.0, 1.0] | missing |" in page, "its epoch has not ended"
    (folder / "out.log").write_text("\n".join(lines).replace(f"[{len(lines) - 1}/99 (3%)]", "[99/99 (100%)]"))
    page = page_of(tmp_path, "stability")
    assert f"| [0.0, 1.0] | 7.2 | {100 * found['log_variation']:.1f} |" in page


@pytest.mark.parametrize("name, scale, where", [
    ("table7", "rich", "scenes, flickr8k"), ("curves", "scenes", "rich, gpu"), ("figure5", "gpu",
     "paper, scenes, flickr8k"), ("table1", "cub", "paper, scenes, rich, gpu, flickr8k")])
def test_a_table_without_rows_at_a_scale_is_refused_and_left_empty_among_others(tmp_path, name, scale, where):
    scale = scales.SCALES[scale]
    message = f"^{name} has no rows at scale {scale.name}[.] It has some at {where}$"
    for names in ([name], [name, "claims"] if scale.selection else [name]):
        with pytest.raises(ValueError, match=message):
            collect.collect(scale, place(tmp_path), names)
    assert not (tmp_path / "tables").exists()
    if scale.name != "cub":
        with pytest.raises(SystemExit, match=message.replace("^", "^error: ")):
            runner.main(["--scale", scale.name, "--tables", name, "--out", str(tmp_path), "--dry-run"])
    others = {"cub": "table6"}.get(scale.name, "table5")
    assert collect.collect(scale, place(tmp_path), [name, others])[name] == f"no rows at {scale.name}\n"


def test_a_mean_over_subsets_needs_all_of_them_from_the_same_seed(tmp_path):
    name, kind = "MDC-ViT-B-32--cc12m--s{}", "image_caption_selection"
    for seed, (att, obj) in enumerate(((0.7, 0.5), (0.9, None))):
        write_result(tmp_path, kind, name.format(seed), "sugar_crepe/swap_att", 32, text_acc=att, cases=10)
        if obj is not None:
            write_result(tmp_path, kind, name.format(seed), "sugar_crepe/swap_obj", 32, text_acc=obj, cases=10)
    cell = next(c for c in TABLES["table2"](scales.PAPER)
                if (c.row, c.column) == ("MDC (heuristic)", "SugarCrepe swap, micro"))
    assert values(read_results(tmp_path), scales.PAPER, cell) == {0: pytest.approx(60)}
