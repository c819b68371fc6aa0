"""Report of a comparison, made from its results.json alone."""

from perspectron.compare.report.page import html

__all__ = ["html"]
