"""The designs, each a folder with all that is its own: mixer, operation, presets, ablations, suites and commands.

`__init__` of a folder registers it (`perspectron.util.registry`); docs/add-a-mixer.md adds one.
"""
