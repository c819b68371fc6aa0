"""Pure functions on tensors. Each has a plain reference beside its fast path."""
