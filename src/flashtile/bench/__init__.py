"""Benchmarks (`flashtile bench`): one registry of cases and implementations, one way to measure, one record format."""
