"""What `examples/demo.py` is made of: training, attention alone at growing lengths, measured pieces, results."""
