"""Work over many shards: units of work, processes or Ray, locks, parquet tables. Imports no model."""
