"""Commands of Perspective."""
