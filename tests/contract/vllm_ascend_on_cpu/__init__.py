"""Scripts that run vllm-ascend's code with real weights on a machine without an NPU (`RehearsalEnvironment.run`).

They run in the environment that `glm5-ascend rehearse --prepare` makes, with its stand-ins for an NPU and its engine
(`glm5_rehearsal`, glm5_ascend/deploy/rehearsal/inside). They do not show the NZ layout of weights, HCCL, several ranks,
graph mode, or results of the NPU's kernels.
"""
