"""Things to copy and change: programs, an objective of your own, a file of default SLOs."""
