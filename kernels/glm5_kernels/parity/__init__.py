"""Parity: every implementation that runs here against the reference, on the same inputs.

`run.parity()` is called by `glm5-ascend parity` and the tests; `cases.py` holds the inputs, `compare.py` compares.
"""
