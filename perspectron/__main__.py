"""`python -m perspectron` is `perspectron`."""

import sys

from perspectron.cli.main import console

sys.exit(console())
