"""Files: atomic writes, shards, images, paths, journals. Imports no model."""
