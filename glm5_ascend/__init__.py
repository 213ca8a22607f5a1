"""GLM-5 on Ascend: quantize, verify, serve; every step provable on a machine without an NPU."""

__version__ = "0.1.0"
