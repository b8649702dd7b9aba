"""Claims about fault injection (tests/faults, `make faults`): a part of it runs with one case."""
import subprocess
import sys

from conftest import REPO, read_json, write_json


def test_a_campaign_counts_cases_and_failures_and_keeps_the_parts_that_are_finished(tmp_path):
    out = tmp_path / "faults.md"
    command = [sys.executable, str(REPO / "tests/faults/campaign.py"), "--out", str(out), "--work",
               str(tmp_path / "work"), "--kills", "1", "--only", "kill prepare-recap"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    page, parts = out.read_text(), sorted((tmp_path / "work/parts").iterdir())
    found = [read_json(path) for path in parts]
    assert len(found) == 1 and not any(part["failures"] or not part["cases"] for part in found)
    for part in found:
        assert f"| {part['part']} | {part['cases']} | 0 |" in page
    assert f"| all | {sum(part['cases'] for part in found)} | 0 |" in page and "--kills 1" in page

    found[0]["failures"] = {"a case": "wrong | number"}  # as a campaign leaves it that was interrupted after this part
    write_json(parts[0], found[0])
    result = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 1 and f"- {found[0]['part']}, a case: wrong | number" in out.read_text()
