"""Code that runs in the environment with vllm-ascend. Of this package it imports only `serve.engine_parser`,
as `glm5_parser`.

`rank` is the program, started as a package with a name of its own. A run does not show the NZ layout of weights, HCCL,
graphs, or results of an NPU.
"""
