"""What is evaluated: captioning, selection, zero-shot classification, linear probe."""
