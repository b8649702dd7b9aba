"""The one attribute of clip_benchmark that is replaced while `register(BENCHMARK)` is in force."""
from open_clip_mdc.integration.patches import Replacement

BENCHMARK = (
    Replacement("clip_benchmark.cli:run", "clip_benchmark_ext.run:run",
                "one model on one data set, done anew: captioners, ARO and VALSE, official metrics, probes of features "
                "kept by content, captions saved before they are scored, result files that say what they are of"),
)
