"""Claims about the package as it is installed."""
import ast
import email.message
import json
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from conftest import REPO, read_json, refused, run
from packaging.requirements import Requirement

import open_clip_mdc


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPO, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns(
        ".venv*", ".git", "build", "*.egg-info", "demo", "__pycache__"))
    # As `make dist`: the wheel from the sdist. What is no package, a later setuptools leaves out.
    built = run("python", "-m", "build", str(source), "--no-isolation", "--outdir", str(out))
    assert "is absent from the `packages` configuration" not in built.stdout + built.stderr
    return next(out.glob("*.whl"))


def test_a_wheel_in_a_clean_environment_lists_the_configs(wheel, tmp_path):
    run("python", "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True)
    script = ("import json; from open_clip_mdc.integration import configs as c; "
              "print(json.dumps([c.ROWS, c.architectures()]))")
    listed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    # Without OpenCLIP at hand. This process may hold rows of plug-ins.
    assert json.loads(listed) == json.loads(run("python", "-c", script).stdout)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    for package, names in {
            "open_clip_mdc": "model_configs/scenes_bpe.txt.gz cli/model_card.md.jinja cli/flags.json py.typed",
            "clip_benchmark_ext": "aro_symmetric_relations.json datasets.json dataset_fields.json "
                                  "lmms/tasks/local_pope.yaml"}.items():
        assert all((site / package / name).exists() for name in names.split())
    points = next(site.glob("open_clip_mdc-*.dist-info/entry_points.txt")).read_text()
    assert "[lmms_eval.models]\nopen_clip_mdc = clip_benchmark_ext.lmms:manifest\n" in points
    scripts = {p.name for p in (tmp_path / "venv" / "bin").iterdir()}
    assert {"open_clip_train", "open_clip_mdc", "clip_benchmark"} <= scripts


def test_declared_dependencies_are_those_that_are_imported():
    """Nothing undeclared is imported, nothing that is declared is unused."""
    distributions = metadata.packages_distributions()
    imported = set()
    for path in [*REPO.glob("src/**/*.py"), *REPO.glob("clip_benchmark_ext/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    # It is said in one line how to get these, where they are missing.
    # lmms-eval, which brings accelerate and datasets, alone imports what uses them.
    optional = {*"spacy nltk transformers diffusers gradio starlette argcomplete lmms_eval accelerate datasets".split()}
    third_party = imported - set(sys.stdlib_module_names) - {"open_clip_mdc", "clip_benchmark_ext"} - optional
    used = {name.lower().replace("-", "_") for module in third_party for name in distributions.get(module, [module])}
    needed = [need for need in map(Requirement, metadata.requires("open_clip_mdc")) if "extra" not in str(need.marker)]
    declared = {need.name.lower().replace("-", "_") for need in needed}
    # What upstream needs for things that are promised here: its undeclared imports (requests, braceexpand), its
    # encoders, its logger and its caption metrics.
    indirect = {"requests", "braceexpand", "timm", "pycocoevalcap"}
    brought = {"torchvision": "open_clip_torch", "tqdm": "open_clip_torch", "markupsafe": "jinja2",
               "threadpoolctl": "scikit-learn", "pandas": "open_clip_torch"}
    for name, by in brought.items():
        needs = [need.lower() for need in metadata.requires(by) if "extra ==" not in need or "training" in need]
        assert any(need.startswith(name) for need in needs), name
    assert used - brought.keys() <= declared, used - declared
    assert declared - indirect <= used, declared - indirect - used


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(next(n for n in archive.namelist() if n.endswith("/METADATA"))))


def test_each_dependency_has_an_end_and_is_installed_within_it(wheel):
    for requirement in map(Requirement, metadata_of(wheel).get_all("Requires-Dist")):
        if any(extra in str(requirement.marker) for extra in ("dev", "docs", "lmms")):  # lmms: an older filelock
            assert "lmms" not in str(requirement.marker) or requirement.specifier, requirement
            continue
        assert any(bound.operator in ("<", "<=", "==") for bound in requirement.specifier), requirement
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:  # of an extra
            continue
        assert requirement.specifier.contains(installed, prereleases=True), (requirement, installed)


def test_the_package_names_the_licence_of_each_of_its_files(wheel):
    """Among them the packaged captioner's: its encoder is Apache-2.0, its decoder not for every use."""
    about = metadata_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(next(n for n in archive.namelist() if n.endswith(f".dist-info/licenses/{name}")))
                 .decode() for name in about.get_all("License-File")}
        packaged = [name for name in archive.namelist() if name.endswith((".gz", ".safetensors"))]
    assert set(about["License-Expression"].split(" AND ")) == {"MIT", "Apache-2.0", "LicenseRef-Flickr8k-research"}
    assert "MIT License" in texts["LICENSE"] and "Apache License" in texts["model_configs/photo/LICENSE"]
    table = texts["LICENSES.md"]
    rows = re.findall(r"`(model_configs/[^`]+)`", table)
    for name in packaged:
        assert any(fnmatch(name.removeprefix("open_clip_mdc/"), row) for row in rows), name
    assert all(name in table for name in about["License-Expression"].split(" AND "))


def test_the_citation_is_of_this_version_and_the_paper_of_the_model_card():
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert citation["version"] == open_clip_mdc.__version__ and citation["license"] == "MIT"
    paper = citation["preferred-citation"]
    bibtex = (REPO / "src" / "open_clip_mdc" / "cli" / "model_card.md.jinja").read_text().partition("@article")[2]
    assert f"{{{paper['title']}}}" in bibtex and f"{{{paper['year']}}}" in bibtex and paper["journal"] in bibtex
    assert " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]) in bibtex


def test_the_captioner_of_the_package_is_small_whole_and_licensed(wheel):
    """Decoder and encoder in 16 bit, with the checksum in the header, beside the licence of the encoder and a card."""
    from safetensors import safe_open

    from open_clip_mdc.data import weights
    assert wheel.stat().st_size < 30e6
    with zipfile.ZipFile(wheel) as archive:
        packaged = {name.rpartition("/")[2] for name in archive.namelist() if "/model_configs/photo/" in name}
    folder = REPO / "model_configs" / "photo"
    assert packaged == {path.name for path in folder.iterdir()} == {
        "LICENSE", "README.md", "flickr8k_bpe.txt.gz", "open_clip_config.json", "open_clip_model.safetensors"}
    file = folder / "open_clip_model.safetensors"
    tensors = weights.read(file)  # compares the checksum
    with safe_open(file, "pt") as header:
        assert header.metadata()["sha256"] == weights.digest(tensors)
    assert all(x.itemsize == 2 for x in tensors.values() if x.is_floating_point())
    assert sum(x.nbytes for name, x in tensors.items() if not name.startswith("visual.")) < 10e6
    card = (folder / "README.md").read_text()
    assert "Flickr8k" in card and "non-commercial research" in card


def test_a_picture_gets_words_with_no_weights_named_and_no_network(tmp_path, monkeypatch):
    from PIL import Image, ImageDraw
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    picture = Image.new("RGB", (320, 240), (90, 160, 70))
    ImageDraw.Draw(picture).ellipse((100, 80, 220, 200), fill=(120, 80, 40))
    picture.save(tmp_path / "photo.jpg")
    run(*f"python -m open_clip_mdc caption {tmp_path}/photo.jpg --out {tmp_path}/captions.jsonl".split(), fork=True)
    row = read_json(tmp_path / "captions.jsonl")
    assert row["image"].endswith("photo.jpg") and len(row["caption"].split()) > 3
    loaded = open_clip_mdc.load("photo")
    assert loaded.caption([tmp_path / "photo.jpg"]) == [row["caption"]]
    assert loaded.caption([picture], text="a [MASK] in the grass")[0].startswith("a ")
    assert "leave out --model" in refused(ValueError, open_clip_mdc.load, "photo", "MDC-ViT-B-32")
