"""Training: the loop, its optimizer, and checkpoints that survive anything."""
