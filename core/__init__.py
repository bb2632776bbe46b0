"""Types and small services every other package may import: the leaf of the import graph."""
