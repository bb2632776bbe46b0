"""Things to copy and change: an objective of your own, a file of default SLOs."""
