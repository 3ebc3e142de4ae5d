"""`python -m flashtile.bench`: the same as `flashtile bench`."""

from flashtile.cli import main

if __name__ == "__main__":
    main("bench")
