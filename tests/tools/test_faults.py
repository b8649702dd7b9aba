"""Claims about fault injection (tests/faults, `make faults`): a part of it runs with one case."""
from conftest import REPO, read_json, run, write_json


def test_a_campaign_counts_cases_and_failures_and_keeps_the_parts_that_are_finished(tmp_path):
    out = tmp_path / "faults.md"
    command = ["python", REPO / "tests/faults/campaign.py", "--out", out, "--work", tmp_path / "work", "--kills", "1",
               "--only", "kill prepare-recap"]
    run(*command)
    page, [path] = out.read_text(), (tmp_path / "work/parts").iterdir()
    part = read_json(path)
    assert part["cases"] and not part["failures"] and "--kills 1" in page
    for name in (part["part"], "all"):
        assert f"| {name} | {part['cases']} | 0 |" in page

    part["failures"] = {"a case": "wrong | number"}  # as a campaign leaves it that was interrupted after this part
    write_json(path, part)
    assert run(*command, check=False).returncode == 1
    assert f"- {part['part']}, a case: wrong | number" in out.read_text()
