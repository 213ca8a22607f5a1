"""What the Triton kernels do, shown without an NPU on three levels (kernels/NPU.md, "How these kernels are proven").

1. `interpreter`: their source run by upstream Triton's interpreter.
2. `lowering`, `structure`: lowered by Triton-Ascend's own compiler, and what the result must look like.
3. `device_compiler`: the lowered text through the device's own compiler.

`levels` runs one level of one op in a process of its own.
"""
