"""Captions as token ids: special tokens, captions without their padding, vocabularies."""
