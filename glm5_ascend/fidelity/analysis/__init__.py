"""Where a quantization loses accuracy, and which modules to keep in more bits under a budget of bytes."""
