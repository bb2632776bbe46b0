"""The adapter to the SGLang runtime: the only package that imports ``sglang``."""
