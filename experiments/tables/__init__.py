"""Cells, scales, and the tables made of them."""
