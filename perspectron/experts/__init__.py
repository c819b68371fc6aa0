"""Routed experts: where they stand, who gets a token, what they compute, their ternary form."""
