"""Networks: image encoders, the text decoder, and `Captioner`, which is both. Knows no decoding and no scoring."""
