"""Conversion: a model with attention becomes one in which recurrences stand in the place of most of it
(docs/guides/convert.md).

RUN/stages/0-taken, 1-layers, 2-chosen and 3-whole are runs of their own, each made of the one before, as in a staged
recipe; RUN itself, the last stage, is an ordinary run. Each depends only on the one before, so that a conversion
resumes bit for bit. RUN/convert.json says what was asked for, what was measured and which layers keep attention.
"""
