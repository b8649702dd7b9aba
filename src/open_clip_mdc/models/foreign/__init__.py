"""Captioners of other projects, one file for each: a subclass of `ForeignCaptioner` in base.py."""
