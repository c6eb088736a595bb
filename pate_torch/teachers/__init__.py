"""PRIVATE. Teachers: one model is trained on each shard of the private records."""
