"""`python -m stator` is the command line."""

from stator.cli import main

main()
