"""Length forecasting: a process of its own that says how long each answer will be."""
