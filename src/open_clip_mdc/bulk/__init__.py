"""Work on many shards, in processes or with Ray: units of work, locks, Parquet tables. Imports no model."""
