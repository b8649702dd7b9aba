"""Readers of data sets, by their official layouts."""
