"""A deployment's ranks built, loaded, weighed and walked by the official code before a machine is rented.

`environment` makes an environment with vllm-ascend from PyPI, `run` starts its Python on the files of `inside`, and
`result` reads what they found.
"""
