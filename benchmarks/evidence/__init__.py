"""What the scripts that train models as evidence have in common."""
