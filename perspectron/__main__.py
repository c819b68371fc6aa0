"""`python -m perspectron` is `perspectron`."""

import sys

from perspectron.cli.main import main

sys.exit(main())
