"""``python -m kmesh.cli`` is ``kmesh``."""

from kmesh.cli import main

if __name__ == "__main__":
    main()
