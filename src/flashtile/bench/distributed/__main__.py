"""`python -m flashtile.bench.distributed`: the same as `flashtile bench distributed`."""

from flashtile.cli import main

if __name__ == "__main__":
    main("bench", "distributed")
