"""vllm-ascend's real code on a machine without an NPU: an environment of its own, and what runs in there.

All run in the interpreter of the environment that `glm5-ascend rehearse --prepare` makes, `shim` first.
Whatever else wants vllm-ascend's code (a forward of its attention on our kernels, its plugin
entry points) is one more script for `VllmAscend.run`, on top of `load.start_worker` if it needs a model.

What no test on top of this can show: the NZ layout of weights on an NPU, HCCL and more than one rank, graph mode, and
what the NPU's own kernels compute.
"""
