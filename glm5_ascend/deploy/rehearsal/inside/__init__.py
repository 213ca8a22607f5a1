"""Code that runs in the environment with vllm-ascend, and imports nothing of the rest of this package.

`rank` is the program, started as a package with a name of its own. A run does not show the NZ layout of weights, HCCL,
graphs, or results of an NPU.
"""
