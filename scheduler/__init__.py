"""The decision core: pure Python and numpy. No I/O, no clock, no randomness, no torch, no SGLang.

The engine and the simulator drive one ``FrameManager``; everything it needs to know is passed in.
"""
