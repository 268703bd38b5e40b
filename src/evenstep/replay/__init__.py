"""Frozen replay: recorded rollouts under several arms, what each costs, and proof that the gradient is the same."""
