"""Reading and writing files: shards, images, tables, weights, journals. Imports no model."""
