"""GPU.md: what a card did beside what was predicted for it, or the predictions alone until one has run."""
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from open_clip_mdc.data.files import new_file, write_json
from open_clip_mdc.data.markdown import markdown_table

FOLDER = Path(__file__).parent
STEP = ("ms", "samples/s", "TFLOP/s", "share", "GB")
TOKENS = 14.1  # of the captions that are measured; other predictions have no counterpart

Find = Callable[..., float | None]


class Goal(NamedTuple):
    text: str
    value: Callable[[Find], float | None]
    least: float


def over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def samples(find: Find, size: str, model: str = "MDC") -> float | None:
    return find("steps", "samples/s", model=model, size=size, batch=1024, mode="compiled")


GOALS = (
    Goal("B/16, batch 1,024, compiled: share of 790 TFLOP/s", lambda find: over(
        find("steps", "TFLOP/s", model="MDC", size="ViT-B-16", batch=1024, mode="compiled"), 790), 0.40),
    Goal("B/16, the same: samples/s over CLIP's",
         lambda find: over(samples(find, "ViT-B-16"), samples(find, "ViT-B-16", "CLIP")), 1.0),
    Goal("B/32, the same: samples/s over CLIP's",
         lambda find: over(samples(find, "ViT-B-32"), samples(find, "ViT-B-32", "CLIP")), 1.2),
    Goal("captioning, B/16, batch 256, 15 tokens, bfloat16: images/s", lambda find: find(
        "decoding", "images/s", batch=256, precision="bfloat16", **{"tokens a step": 1}), 3000),
)


def read_json(path: Path) -> dict:
    """{} where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def find(parts: dict[str, list[dict]], part: str, value: str, **case: object) -> float | None:
    """A value of the row of this case; None where there is none."""
    rows = (row for row in parts.get(part, ()) if row.get("tokens", TOKENS) in (TOKENS, 77)
            and all(row.get(key) == wanted for key, wanted in case.items()))
    return next((row.get(value) for row in rows), None)


def show(value: object) -> str | None:
    """Three digits of a number, the rest as it is."""
    if not isinstance(value, float):
        return value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(rows: Iterable[dict]) -> str:
    """All keys of the rows, but for lists, as columns."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    return markdown_table(columns, [[show(row.get(column)) for column in columns] for row in rows])


def goals(predicted: dict, measured: dict) -> str:
    rows = []
    for goal in GOALS:
        values = [goal.value(lambda *a, source=source, **k: find(source, *a, **k)) for source in (predicted, measured)]
        verdict = None if values[1] is None else "met" if values[1] >= goal.least else "missed"
        rows.append((goal.text, f"at least {show(float(goal.least))}", *map(show, values), verdict))
    return markdown_table(("goal", "", "predicted at best", "measured", ""), rows)


def steps(predicted: dict, measured: dict) -> str:
    """Predicted and measured steps side by side."""
    rows = []
    for row in predicted.get("steps", ()):
        case = {key: row[key] for key in ("model", "size", "batch", "mode")}
        own = {} if row["tokens"] == 60 else {
            key: find(measured, "steps", key, **case) for key in (*STEP, "graphs", "note")}
        rows.append((f"{row['model']} {row['size']}", row["batch"], show(row["tokens"]), row["mode"],
                     *(show(row.get(key)) for key in STEP), *(show(own.get(key)) for key in (*STEP, "graphs", "note"))))
    return markdown_table(("model", "batch", "tokens", "mode", *(f"{key}, predicted" for key in STEP),
                           *(f"{key}, measured" for key in (*STEP, "graphs")), ""), rows)


def predicted_parts(predicted: dict) -> str:
    """Where the time of the predicted eager steps of batch 1,024 goes."""
    rows = [{"model": f"{row['model']} {row['size']}", "tokens": row["tokens"], "part": name,
             "kernels": part["kernels"], "TFLOP": part["flops"] / 1e12, "GB moved": part["bytes"] / 1e9,
             "matrix work, ms": 1e3 * part["matrix_seconds"], "rest, ms": 1e3 * part["other_seconds"]}
            for row in predicted["steps"] if row["batch"] == 1024 and row["size"] == "ViT-B-16" and "parts" in row
            for name, part in row["parts"].items()]
    return table(rows)


def kernels(measured: dict) -> list[str]:
    """The ten heaviest kernels of each measured step."""
    return [f"{row['model']} {row['size']}, batch {row['batch']}, {row['mode']}: all kernels "
            f"{show(row['kernel ms'])} ms\n\n" + markdown_table(("kernel", "ms", "calls"), row["kernels"])
            for row in measured.get("steps", ()) if row.get("kernels")]


def report(predictions: dict, results: dict) -> str:
    """The whole of GPU.md."""
    measured = results.get("parts", {})
    status = (f"Measured on {results['chip']}, torch {results['torch']}, open_clip {results['open_clip']}, "
              f"{results['date']}." if measured else
              "**Predictions. No GPU has run any of this yet.** Columns that say \"measured\" are empty until one has.")
    text = ["# Speed and memory on a GPU", status,
            "`make bench-gpu` measures everything below on the card at hand, each part within 10 minutes, and writes "
            "this file anew. Predictions are made without a card by `python -m benchmarks.roofline`, from every "
            "operator's bytes and multiplications on fake tensors; they are bounds of what ideal kernels could do, for "
            "an H200.",
            "## Goals", goals(predictions, measured),
            "## Training step", "Forward, backward and AdamW, amp_bf16; captions of Flickr8k's lengths (14.1 tokens "
            "with SOT and EOT), and of 60 for the predictions. GB: peak, weights and optimizer included. Share: of one "
            "large bfloat16 product's TFLOP/s on the same card. CLIP reads 77 tokens whatever the caption.",
            steps(predictions, measured)]
    if predictions:
        memory = [{"model": f"{row['model']} {row['size']}", "batch": row["batch"], "tokens": row["tokens"],
                   "peak, GB, weights and optimizer included": row["GB"],
                   "of it the vocabulary loss adds": row["loss GB"]}
                  for row in predictions["steps"] if row["mode"] == "eager" and row["model"] == "MDC"]
        text += ["## Predicted: memory", table(memory),
                 "## Predicted: where the time goes, B/16, batch 1,024, eager", predicted_parts(predictions),
                 "## Predicted: decoding, B/16, 15 tokens, eager", table(predictions["decoding"])]
    for part, rows in measured.items():
        text += [f"## Measured: {part}", table(rows)]
    if kernels(measured):
        text += ["## Measured: the ten heaviest kernels", *kernels(measured)]
    return "\n\n".join(text) + "\n"


def write_report(folder: Path, results: dict) -> None:
    """gpu.json, if there are results, and GPU.md beside predictions.json."""
    if results:
        write_json(folder / "gpu.json", results, indent=1)
    with new_file(folder / "GPU.md") as partial:
        partial.write_text(report(read_json(folder / "predictions.json"), results))
