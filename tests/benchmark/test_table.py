"""Claims about the Markdown tables of result files."""
import pytest
from conftest import read_json, run, write_json

from clip_benchmark_ext.metrics.sugar_crepe import GROUPS
from clip_benchmark_ext.table import markdown, read_results
from open_clip_mdc.data.markdown import markdown_table


def write(folder, dataset, **metrics):
    path = folder / f"{dataset.replace('/', '_')}.json"
    write_json(path, {"dataset": dataset, "model": "ViT-B-32", "pretrained": "x.pt", "language": "en",
                      "task": "image_caption_selection", "metrics": metrics})
    return str(path)


def test_a_table_has_a_line_per_row_and_empty_cells_where_nothing_is_known():
    assert markdown_table(["a", "b"], [[1, None], ["x|y", "z"]]).splitlines() == [
        "| a | b |", "| --- | --- |", "| 1 |  |", "| x\\|y | z |"]
    with pytest.raises(ValueError, match="argument 2 is shorter than argument 1"):
        markdown_table(["a", "b"], [[1]])


def test_groups_of_sugar_crepe_are_shown_over_subsets_and_over_cases_under_these_names(tmp_path):
    files = [write(tmp_path, f"sugar_crepe/{subset}", text_acc=accuracy, text_acc_blind=0.5, cases=cases, ties=1)
             for subset, accuracy, cases in (("swap_att", 0.9, 30), ("swap_obj", 0.5, 10))]
    head, _, *rows = markdown(read_results(files)).splitlines()
    assert head == "| data set | model (run) | scorer | accuracy | blind | ties | cases |"
    assert rows[:2] == ["| sugar_crepe/swap, macro | ViT-B-32 |  | 70.0 | 50.0 | 2 | 40 |",
                        "| sugar_crepe/swap, micro | ViT-B-32 |  | 80.0 | 50.0 | 2 | 40 |"]


def test_what_a_likelihood_says_is_never_shown_without_its_debiased_number(tmp_path):
    head, _, row = markdown(read_results([write(tmp_path, "wds/probe", acc1=0.25, acc5=0.5, acc1_blind=0.1,
                                                acc5_blind=0.3, acc1_debiased=0.75, acc5_debiased=1.0,
                                                shortlist=3)])).splitlines()
    assert head.endswith("| top-1 | top-1 blind | top-1 debiased | top-5 | top-5 blind | top-5 debiased | shortlist |")
    assert row.endswith("| 25.0 | 10.0 | 75.0 | 50.0 | 30.0 | 100.0 | 3 |")


def test_results_of_other_settings_are_averaged_apart(tmp_path):
    files = []
    for draws, accuracy in ((4, 0.5), (8, 0.75)):
        for subset in GROUPS["swap"]:
            files.append(write(tmp_path / str(draws), f"sugar_crepe/{subset}", text_acc=accuracy, cases=4))
            write_json(files[-1], read_json(files[-1]) | {"settings": {"num_samples": draws, "dataset_root": subset}})
    rows = markdown(read_results(files)).splitlines()[2:]
    assert sorted(row.split("|")[4].strip() for row in rows if "macro" in row) == ["50.0", "75.0"]


def test_without_a_number_of_cases_there_is_no_mean_over_them_and_what_no_column_shows_is_no_row(tmp_path):
    files = [write(tmp_path, f"sugar_crepe/{subset}", text_acc=0.25, image_acc=1.0, acc=0.25, cases=None,
                   text_acc_missing="a reason", **{"iou car/truck": 0.5})
             for members in GROUPS.values() for subset in members]
    table = run("python", "-m", "clip_benchmark_ext.table", *files, fork=True).stdout
    assert "| sugar_crepe/add, macro | ViT-B-32 |  | 25.0 |" in table and "micro" not in table


def test_what_is_no_result_file_is_named_in_one_line(tmp_path):
    (tmp_path / "x.json").write_text("[]")
    result = run("python", "-m", "clip_benchmark_ext.table", str(tmp_path / "x.json"), check=False, fork=True)
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "x.json is not a result" in result.stderr
    for name, value in [("text_acc", "1"), ("text_acc_blind", [1]), ("scorer", 3), ("cases", {}), ("lp_acc1", True)]:
        with pytest.raises(ValueError, match=f"is not a result file .*{name} is "):
            read_results([write(tmp_path, "sugar_crepe/swap_att", **{name: value})])
    for changed in ({"pretrained": 3}, {"dataset": None}, {"metrics": [1]}, {"settings": 3}):
        path = write(tmp_path, "sugar_crepe/swap_att", text_acc=0.5)
        write_json(path, read_json(path) | changed)
        with pytest.raises(ValueError, match="is not a result file"):
            read_results([path])
    assert "usage:" in run("python", "-m", "clip_benchmark_ext.table", "--help", fork=True).stdout
