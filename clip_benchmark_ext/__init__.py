"""clip_benchmark for captioners: probes of their image features, and tasks decided by their likelihoods."""
