"""The worlds the scheduler runs in, and the demo model."""
