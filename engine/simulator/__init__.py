"""A discrete-event engine in virtual time, driven by the scheduler object that serves."""
