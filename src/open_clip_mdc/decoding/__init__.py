"""Captions from a trained model: most confident first (Eq. 6), ancestral sampling, beam search, CLIP guidance."""
