"""The parts that every operation needs and none owns: checks of arguments, choice of backend, dropout bits,
dispatch."""
