"""The seam to OpenCLIP: what is replaced there, model configs by name, checkpoints, training and validation."""
