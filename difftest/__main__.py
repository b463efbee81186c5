"""`python -m difftest`: the command under a chosen interpreter."""

from .cli import main

main()
