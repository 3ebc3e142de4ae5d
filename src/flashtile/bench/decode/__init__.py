"""The benchmark of decoding: one new token of each sequence attends to a cache of keys and values."""
