"""Rehearsal of a deployment: vllm-ascend's own code builds, loads, measures and steps ranks without an NPU.

`environment` installs vllm-ascend from PyPI, `run` starts its Python on the files of `inside`, and `result` reads their
reports.
"""
