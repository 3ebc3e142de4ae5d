"""The benchmark of context-parallel attention: our strategies and PyTorch's own, beside one GPU, in one run."""
