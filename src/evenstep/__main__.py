"""``python -m evenstep`` is the command line."""

from evenstep.cli import main

if __name__ == "__main__":
    main()
