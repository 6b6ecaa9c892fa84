# SPDX-License-Identifier: Apache-2.0
"""`python -m torchax_dflash` is the command `torchax-dflash`."""

import sys

from torchax_dflash.cli import main

if __name__ == "__main__":
    sys.exit(main())
