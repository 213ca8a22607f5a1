"""What the HTML reports share: one self-contained page, and drawings as SVG."""
