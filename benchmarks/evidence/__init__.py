"""The common parts of the scripts that train models as evidence."""
