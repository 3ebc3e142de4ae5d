"""GPT-2 on real text: losses of flashtile and of transformers' eager attention, step by step."""
