"""Pattern graphs: what a program that unfolds will still call, told from finished ones."""
