"""What `examples/train_gpt.py` is made of: options, data, processes, model and optimizer, checkpoints, reports."""
