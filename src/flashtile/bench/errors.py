"""The error of the benchmarks, apart from what loads torch."""


class ChoiceError(ValueError):
    """A table, a case or an implementation was asked for that is not there."""


def how_to_install(extra: str) -> str:
    """How an extra of flashtile is installed. It is on no package index: whoever takes the name there is another."""
    return f'in a checkout of flashtile, pip install ".[{extra}]"'
