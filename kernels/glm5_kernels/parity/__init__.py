"""Parity: every implementation that runs here against the reference, on the same inputs.

`run.parity()` is what `glm5-ascend parity` and the tests call; `cases.py` holds the inputs, `compare.py` the comparison.
"""
