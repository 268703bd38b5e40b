"""Finding the token budget: what cells of a few sizes need, what larger ones will, and the budget that fits."""
