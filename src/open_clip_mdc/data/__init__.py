"""Files: atomic writes, shards, images, vocabularies."""
