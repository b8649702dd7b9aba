"""Work on many shards, in several processes: units of work, locks, Parquet tables. Imports no model."""
