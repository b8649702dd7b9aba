"""clip_benchmark with captioners: likelihood scoring, linear probes, compositionality data sets."""
