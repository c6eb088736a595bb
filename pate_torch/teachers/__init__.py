"""PRIVATE. Teachers: one model for each shard of the private records."""
