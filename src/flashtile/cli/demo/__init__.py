"""`flashtile demo`: trains a small GPT on flashtile and on plain attention, and compares losses, speed and memory."""
