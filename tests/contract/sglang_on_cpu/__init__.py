"""SGLang's real code on a machine without an NPU: an environment of its own, and what runs in there.

Real: resolution of the arguments, model config, the reader of our format, model classes, weight loaders, what is done
to weights after loading, the NPU branches of attention, indexer and experts, parallel groups (on gloo). Stand-ins: the
modules that need an NPU (`npu_modules`), their operators in plain torch (`npu_operators`), attention over a cache
(`attention`). SGLang 0.5.23's CPU wheel parts are not used.

`serve` runs its whole server so: scheduler, prefix cache, sampling, parsers, HTTP; `token_cache` says what is not its
own. What no test on top of this can show: NZ layouts, HCCL, DeepEP, graphs, MLAPO, drafts inside the scheduler, what
the NPU's kernels compute.
"""
