"""Synthetic images with captions: simple shapes in three worlds (plain, rich, mentions), drawn by drawing.py."""
