"""The benchmark of whole training steps: flashtile's GPT beside that of transformers, from the same weights."""
