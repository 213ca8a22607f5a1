"""For Ascend NPUs: forwarders to the official operators, and our Triton kernels in `triton/`."""
