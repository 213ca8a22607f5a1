"""What the Triton kernels do, shown without an NPU on two levels (kernels/NPU.md, "How these kernels are proven").

1. `interpreter`: their source run by upstream Triton's interpreter.
2. `lowering`, `device_compiler`: lowered by Triton-Ascend's own compiler, and that text through the device's own.

`levels` runs one level of one op in a process of its own.
"""
