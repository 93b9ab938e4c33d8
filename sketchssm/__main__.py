"""Run the command line: ``python -m sketchssm``."""

from sketchssm.cli import main

if __name__ == "__main__":
    main()
