"""Metrics of captions and of selection tasks, from texts and scores alone."""
