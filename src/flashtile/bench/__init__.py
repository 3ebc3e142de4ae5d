"""Benchmarks: one registry of cases and implementations, one way to measure, one record format.

`flashtile bench` and, with the standard library alone, `python -m flashtile.bench` run them.
"""
