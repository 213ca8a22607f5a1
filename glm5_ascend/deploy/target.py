"""Targets of `deploy render`."""

from __future__ import annotations

from enum import StrEnum


class RenderTarget(StrEnum):
    """Value of `deploy render --to`."""

    shell = "shell"
    compose = "compose"
    k8s = "k8s"
    kustomize = "kustomize"
