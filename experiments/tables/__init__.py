"""What is run: cells, scales, and the tables made of them."""
