"""All contact with OpenCLIP: replaced attributes, model configs by name, checkpoints, training and validation."""
