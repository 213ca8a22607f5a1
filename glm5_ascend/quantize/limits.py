"""Sizes of blocks, samples and batches: tuned constants, also used by the estimates of memory and time."""

from __future__ import annotations

#: Weights of a block of rows; a block is read, rounded and written at once.
BLOCK_WEIGHTS = 2**22
#: A block's rows are a multiple of this: INT4 packs two rows into one.
BLOCK_ROWS = 16
#: Rows of a linear's input kept for the smoothing searches, all calibration sequences together.
SEARCH_ROWS = 512
#: Tokens that a routed expert works on at a time.
EXPERT_TOKENS = 512
#: Output rows a search looks at, evenly spaced: a scale belongs to input channels, which all rows share.
SEARCH_OUTPUTS = 512
