"""What the HTML reports share: one self-contained page, its charts, where a result comes from, what it is worth."""
