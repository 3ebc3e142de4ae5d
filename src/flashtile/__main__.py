"""`python -m flashtile`: the same as `flashtile`."""

from flashtile.cli import main

if __name__ == "__main__":
    main()
