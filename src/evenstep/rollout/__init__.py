"""Rollouts: engines, environments, the agent loop with compaction, and closing a collection."""
