"""Shared pieces of the tests: tiny models of the real classes, captions, the shared data folder, running commands."""
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from csv import writer as csv_writer
from importlib import import_module
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads them
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import open_clip  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402
from forked import forked  # noqa: E402
from PIL import Image  # noqa: E402

from open_clip_mdc import (  # noqa: E402
    cli,  # noqa: E402
    extras,  # noqa: E402, F401  registers its objectives
    register,
    unregister,
)
from open_clip_mdc.integration.factory import OpenCLIPCaptioner  # noqa: E402
from open_clip_mdc.objectives import OBJECTIVES  # noqa: E402
from open_clip_mdc.text.special_tokens import eot_id, sot_id  # noqa: E402

REPO = Path(__file__).resolve().parent.parent
VOCAB, LENGTH = 60, 12
VISION = dict(image_size=32, patch_size=8, width=64, head_width=32, layers=2)
TEXT = dict(context_length=LENGTH, vocab_size=VOCAB, width=32, heads=2, layers=2)
SHARED = Path(os.environ.get("MDC_SHARED_DATA", REPO.parent / "shared/data"))  # real data, which may be missing

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")


def needs_data(*names: str):
    """Skips a test where a file or folder of SHARED that it reads is not there."""
    lacking = [name for name in names if not (SHARED / name).exists()]
    return pytest.mark.skipif(bool(lacking), reason=f"{SHARED} has no {', '.join(lacking)}")


def on_gpu(test: Callable) -> Callable:
    """Skips a test where there is no GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def untrained_captioner(objective: str = "mdc", seed: int = 0, layers: int = 2, **caption_cfg) -> OpenCLIPCaptioner:
    """A real Captioner of 60 ids, 12 positions, 32 px, in eval mode."""
    torch.manual_seed(seed)
    if objective in OBJECTIVES and OBJECTIVES[objective].order == "blocks":
        caption_cfg = {"block_sizes": [3], **caption_cfg}
    return OpenCLIPCaptioner(64, VISION, TEXT | {"layers": layers}, dict(objective=objective, **caption_cfg)).eval()


def tiny_captioner(objective: str = "mdc", seed: int = 0, layers: int = 2, **caption_cfg) -> OpenCLIPCaptioner:
    """An `untrained_captioner` with weights large enough to have opinions."""
    model = untrained_captioner(objective, seed, layers, **caption_cfg)
    torch.nn.init.normal_(model.text.output.weight, std=0.3)
    torch.nn.init.normal_(model.text.token_embedding.weight, std=0.5)
    return model


def with_weights_of(model, objective: str, **caption_cfg) -> OpenCLIPCaptioner:
    """Another objective's `tiny_captioner` with a model's weights, but for the length head."""
    other = tiny_captioner(objective, **caption_cfg)
    other.load_state_dict({name: x for name, x in model.state_dict().items() if not name.startswith("length_head")})
    return other


def magnified(objective: str, **caption_cfg) -> OpenCLIPCaptioner:
    """An `untrained_captioner` of four times the weights: tokens, places and the image matter to its predictions."""
    model = untrained_captioner(objective, **caption_cfg)
    with torch.no_grad():
        for parameter in model.text.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def with_opinions(model, spread: float = 1.0):
    """A model that finds neither all captions nor all lengths alike."""
    torch.nn.init.normal_(model.text.output.weight, std=0.3)
    if model.length_head is not None:
        torch.nn.init.normal_(model.length_head.weight.data[3:9], std=spread * model.length_head.narrowing)
    return model


@pytest.fixture(scope="session")
def mdc() -> OpenCLIPCaptioner:
    return magnified("mdc")


@pytest.fixture(scope="session")
def arc() -> OpenCLIPCaptioner:
    return magnified("arc")


def run_folder(folder: Path, model_name: str, seed: int = 1, **model_args) -> Path:
    """A run as open_clip_train leaves it, of an untrained model that has opinions.

    Args:
        seed: of the model's weights.
        model_args: of params.txt, such as force_image_size=48.
    """
    register()
    torch.manual_seed(seed)
    model = with_opinions(open_clip.create_model(
        model_name, **{k: v for k, v in model_args.items() if k.startswith("force")}), 0.1)
    return write_run(folder, model.state_dict(), model=model_name, **model_args)


def write_run(folder: Path, state: dict[str, torch.Tensor], **params) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "params.txt").write_text("".join(f"{k}: {v}\n" for k, v in params.items()))
    torch.save({"state_dict": state}, folder / "checkpoints/epoch_1.pt")
    return folder


@pytest.fixture(scope="module")
def registered_for_training():
    register(training=True)
    yield
    unregister()


@pytest.fixture(scope="module")
def state(registered_for_training) -> dict[str, torch.Tensor]:
    """The weights of an untrained MDC-ViT-Ti-8."""
    torch.manual_seed(0)
    return open_clip.create_model("MDC-ViT-Ti-8").state_dict()


def captions(lengths: list[int], seed: int = 0, width: int = LENGTH) -> torch.Tensor:
    """Random captions with the given numbers of tokens, SOT and EOT included: long [len(lengths), width]."""
    generator = seeded(seed)
    text = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in zip(text, lengths, strict=True):
        row[:n] = torch.randint(0, VOCAB - 2, (n,), generator=generator)
        row[0], row[n - 1] = sot_id(VOCAB), eot_id(VOCAB)
    return text


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, size: int = 32, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, size, size, generator=seeded(seed))


def make_image(number: int, width: int = 40, height: int | None = None) -> Image.Image:
    """Noise, the same at every call."""
    noise = torch.randint(0, 256, (height or width, width, 3), generator=seeded(number), dtype=torch.uint8)
    return Image.fromarray(noise.numpy())


def made_images(transform: Callable[[Image.Image], torch.Tensor], count: int, *size: int) -> torch.Tensor:
    return torch.stack([transform(make_image(number, *size)) for number in range(count)])


def picture(path: Path, number: int, *size: int) -> str:
    """Save `make_image` without losses, whatever the suffix says, and return the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make_image(number, *size).save(path, "PNG")
    return path.name


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    """The file of an image."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png(number: int, size: int = 40) -> bytes:
    return saved(make_image(number, size))


def json_lines(path: Path | str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def write_tar(path: Path, content: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in content.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def read_json(path: str | Path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write_json(path: str | Path, content) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_csv(path: Path, rows: Iterable, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv_writer(file, **options).writerows(rows)
    return path


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}


def words(*argv) -> list[str]:
    """Return the words of a command. What begins with -- holds as many words as one likes."""
    return [word for x in map(str, argv) for word in (x.split() if x.startswith("--") else [x])]


def run(*command, check: bool = True, timeout: float = 3600, fork: bool = False, **env: str
        ) -> subprocess.CompletedProcess:
    """Run a command with this Python's environment. If it fails, its output is in the assertion.

    The time-out is long, as it only has to end a command that hangs, also on a busy machine.

    Args:
        fork: run `python -m` or `python -c` in a fork of a process that has imported OpenCLIP already.
    """
    command = words(*command)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "", **env}
    if fork:
        result = forked(command[1:], timeout, env)
    else:
        program = sys.executable if command[0] == "python" else command[0]
        result = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=timeout, env=env)
    if check:
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    return result


def run_tool(argv: Iterable) -> None:
    """Run `open_clip_mdc ARGV` in this process, and what has moved as `python -m experiments.NAME`."""
    argv = words(*argv)
    for count in (1, 2):
        if (name := " ".join(argv[:count])) in cli.MOVED:
            return import_module(f"experiments.{cli.module_of(name)}").main(argv[count:])
    cli.main(argv)


def complaint_of(*argv) -> str | int | None:
    """Return the message with which a tool exits when run in this process, or None if it succeeds."""
    try:
        run_tool(argv)
    except SystemExit as end:
        return str(end) if end.code else end.code
    return None


def refused(error: type[BaseException] | tuple, call: Callable, *args, **kwargs) -> str:
    """Return the one line with which a call raises an error."""
    with pytest.raises(error) as raised:
        call(*args, **kwargs)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def times(paths: Iterable[Path]) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in paths}


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds. The time-out only ends a test that hangs."""
    deadline = time.monotonic() + 1200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def killed_when(moment: Callable[[], object], *argv: str, **options) -> int:
    """Run Python with `argv`, kill it when a condition holds, and return its exit status."""
    with subprocess.Popen([sys.executable, *words(*argv)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                          cwd=REPO, **options) as process:
        wait_for(lambda: moment() or process.poll() is not None)
        process.kill()
    return process.returncode


@pytest.fixture(scope="session")
def scenes(tmp_path_factory) -> Path:
    """A small embedded data set, made by the real command."""
    out = tmp_path_factory.mktemp("data") / "scenes"
    run("python", "-m", "open_clip_mdc", "scenes", "--out", out, "--num-train", "512", "--num-val", "64",
        "--num-probe", "96", "--num-pairs", "40", fork=True)
    return out


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """Run folders `mdc`, `arc` and `mcd` of untrained models."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate(("MDC-ViT-Ti-8", "ARC-ViT-Ti-8", "MCD-ViT-Ti-8-mcs")):
        run_folder(folder / name[:3].lower(), name, seed)
    unregister()
    return folder


@pytest.fixture(scope="session")
def image() -> torch.Tensor:
    return 3 * images(5, seed=1)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The test's folder as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def photos(here) -> list[str]:
    """Three pictures in the working directory."""
    return [picture(here / f"{number}.png", number, 32) for number in range(3)]


@pytest.fixture
def clip_benchmark(tmp_path, monkeypatch):
    """Run the command in this process and in an empty folder. Replaced attributes are restored afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["clip_benchmark"])
    yield
    unregister()


@pytest.fixture
def no_java(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def write_pairs(shard: Path, table: Path) -> None:
    """Write the first 48 pairs of a shard of scenes as files beside `table`, a csv of upstream's format."""
    rows, content = [], members(shard)
    for name in [name for name in content if name.endswith(".txt")][:48]:
        image = table.parent / f"{len(rows)}.png"
        image.write_bytes(content[name.removesuffix("txt") + "png"])
        rows.append({"filepath": str(image), "title": content[name].decode()})
    pd.DataFrame(rows).to_csv(table, sep="\t", index=False)


@pytest.fixture(scope="session")
def csv(scenes, tmp_path_factory):
    """48 scenes as files and a csv of upstream's format."""
    table = tmp_path_factory.mktemp("csv") / "train.csv"
    write_pairs(scenes / "val/00000.tar", table)
    return table
