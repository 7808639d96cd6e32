"""`python -m farflung` is the command `farflung`, for where the script is not on the PATH."""

import sys

from farflung.console.main import main

if __name__ == "__main__":  # child processes started by multiprocessing import this file again
    sys.exit(main())
