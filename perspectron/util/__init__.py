"""Utilities shared by all packages: configuration, errors, files and stores, plots, random numbers, the machine."""
