"""Metrics of captions and of selection tasks."""
