"""What runs inside the environment that holds vllm-ascend. Nothing here imports the rest of us, or the reverse.

`rank` is the program. It is started as a package of its own name, so that nothing but these files is found beside what
the environment holds. What no run here can show: the NZ layout of weights, HCCL, graphs, what an NPU computes.
"""
