"""The report of a comparison: a function of its results (`results.json`) alone."""

from perspectron.report.whole import html, markdown

__all__ = ["html", "markdown"]
