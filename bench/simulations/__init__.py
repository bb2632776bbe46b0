"""The paper's evaluation in the simulator: cells, how they are run, and what is made of them."""
