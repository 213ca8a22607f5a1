"""SGLang's real code on a machine without an NPU: an environment of its own, and what runs in there.

Real: resolution of the arguments, model config, the reader of our format, model classes, weight loaders, what is done
to weights after loading, parallel groups (on gloo). Stand-ins: the modules that need an NPU (`npu_modules`). No forward
runs, and SGLang 0.5.23's CPU wheel parts are not used.
"""
