"""Decoding of captions: most confident token first (Eq. 6), ancestral sampling, beam search, CLIP guidance."""
