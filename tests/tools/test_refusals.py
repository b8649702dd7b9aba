"""The contract of refusals: a wrong command ends with one line that names the flag or the file, and writes nothing.

A new refusal is a row of fixtures/refusals.txt.
"""
import gzip
import shlex
import shutil
from pathlib import Path

import open_clip
import pytest
import torch
from conftest import picture, png, run_tool, write_run

from clip_benchmark_ext.cli import main as benchmark
from open_clip_mdc import register, train, unregister
from open_clip_mdc.data.shards import tar_writer

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Runs of MDC, blocks and ARC, a CLIP model's, images, shards, captions, and much that is not what it seems."""
    register()
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(FIXTURES / "place", folder, dirs_exist_ok=True)
    shutil.copytree(FIXTURES / "wrong", folder / "wrong")
    for alias, name in (("mdc", "MDC-ViT-Ti-8"), ("b4", "MDC-ViT-Ti-8-b4"), ("arc", "ARC-ViT-Ti-8"),
                        ("clip", "ViT-Ti-8"), ("mix", "Mix-ViT-Ti-8-arc25"), ("concept", "Concept-ViT-Ti-8"),
                        ("lstm", "ARC-ViT-Ti-8-lstm")):
        write_run(folder / alias, open_clip.create_model(name).state_dict(), model=name)
    weights = (folder / "mdc/checkpoints/epoch_1.pt").read_bytes()
    for name in ("unknown", "nameless", "norun"):
        (folder / name / "checkpoints").mkdir(parents=True)
    for name, size in (("bare.pt", None), ("cut.pt", 5000), ("unknown/checkpoints/epoch_1.pt", None)):
        (folder / name).write_bytes(weights[:size])
    torch.save({"state_dict": {}}, folder / "nameless/checkpoints/epoch_1.pt")
    for i in range(34):
        picture(folder / f"images/{i}.png", i, 32)
    rows = "".join(f"{folder}/images/{i}.png\ta dog\n" for i in range(34))
    (folder / "pairs.csv").write_text(f"filepath\ttitle\n{rows}")
    (folder / "cut.csv.gz").write_bytes(gzip.compress(rows.encode())[:40])
    (folder / "nothing").mkdir()
    (folder / "link.csv").symlink_to("mine.csv")
    with tar_writer(folder / "0.tar") as writer:
        writer.write({"__key__": "a", "png": png(0, 32), "txt": "a star", "json": "{}"})
    (folder / "cut.tar").write_bytes((folder / "0.tar").read_bytes()[:700])
    for name in ("0.tar", "1.tar"):
        shutil.copy(folder / "0.tar", folder / "sized" / name)
    with tar_writer(folder / "wds/test/0.tar") as writer:
        for i in range(2):
            writer.write({"__key__": str(i), "png": png(0, 32), "txt": "a star"})
    (folder / "wds/train").symlink_to(folder / "wds/test")
    yield folder
    unregister()


def rows() -> list:
    """Return program, command, and what the answer must name, for each row of the table."""
    found, program = [], ""
    for line in (FIXTURES / "refusals.txt").read_text(encoding="utf-8").splitlines():
        command, _, named = line.partition(" => ")
        if line.startswith("["):
            program = line.strip("[]")
        elif line and not line.startswith("#"):
            found.append(pytest.param(program, shlex.split(command), named, id=f"{program} {command}"))
    return found


def state() -> set:
    """The paths of the working directory, and when files were written."""
    return {(path, path.is_file() and path.stat().st_mtime_ns) for path in Path().rglob("*")}


def refuse(program: str, argv: list[str]) -> None:
    if program == "open_clip_train":
        train.main(argv)
    elif program == "clip_benchmark":
        benchmark(argv)
    else:  # which takes a GPU if there is one
        with_model = "--pretrained" in argv and "--device" not in argv and argv[0] not in ("export", "finetune")
        run_tool([*argv, "--device", "cpu"] if with_model else argv)


@pytest.mark.parametrize("program, argv, named", rows())
def test_a_wrong_command_is_refused_in_one_line(program, argv, named, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr("sys.argv", ["clip_benchmark"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for variable in ("OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(variable, raising=False)
    if program == "open_clip_train":  # it refuses before it spends a minute on a model
        # Its module is imported before OpenCLIP's function is replaced, or it would keep what stands for it.
        for place_of in ("open_clip_train.main", "open_clip"):
            monkeypatch.setattr(f"{place_of}.create_model_and_transforms", lambda *a, **k: pytest.fail("a model"))
    before = state()
    with pytest.raises(SystemExit) as end:
        refuse(program, argv)
    said = capsys.readouterr().err.strip()
    line = said[said.index("error: "):]
    assert end.value.code == 2 and named in line, said
    assert "Traceback" not in said and "[Errno" not in line and len(line) < 700, line
    assert all(row.startswith("  ") for row in line.splitlines()[1:]), line  # a list, announced by the first line
    left = {path for path, _ in state() - before if path.name not in (
        "tables", "captions", "pairs") and path.suffix != ".pyc"}
    assert not left, left
