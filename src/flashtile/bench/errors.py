"""The error of the benchmarks, apart from what loads torch."""


class ChoiceError(ValueError):
    """A table, a case or an implementation was asked for that is not there."""
