"""``python -m sketchssm``: the command line."""

from sketchssm.cli import main

main(prog_name="python -m sketchssm")
