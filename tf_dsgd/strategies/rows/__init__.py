"""Tables that are split by rows over the shards, and optimizers that act on touched rows only."""
