"""`flashtile tune`: measures how kernels are cut best on the GPU of this machine. Opt-in, never part of a call."""
