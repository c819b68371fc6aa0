"""Training: the loop, the optimizer, and checkpoints from which it resumes bit for bit."""
