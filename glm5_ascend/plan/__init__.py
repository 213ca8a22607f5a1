"""Does it fit, which layout, how fast: answers on paper, with an error band checked against public numbers."""
