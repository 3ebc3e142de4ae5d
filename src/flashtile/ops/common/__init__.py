"""The parts that every operation needs and none owns: checks, choice of backend, dropout bits, dispatch."""
