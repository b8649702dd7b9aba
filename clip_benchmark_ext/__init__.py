"""clip_benchmark for captioners: linear probes of GAP features, and everything that likelihoods can decide."""
