"""What the served names have in common: arguments, attention weights that were asked for, keys that lie elsewhere."""
