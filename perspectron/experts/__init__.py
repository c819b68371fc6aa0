"""Routed experts: their positions, the routing of tokens, their networks, and their ternary form."""
