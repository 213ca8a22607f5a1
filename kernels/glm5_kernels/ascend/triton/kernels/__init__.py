"""Kernels in Triton, read by the compiler of Triton or Triton-Ascend."""
