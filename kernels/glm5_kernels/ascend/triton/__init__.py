"""Our ops as Triton kernels for Triton-Ascend: `<op>.py` checks operands and launches `kernels/<op>.py`."""
