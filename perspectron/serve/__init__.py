"""Conversations for many: the engine, and the server around it."""
