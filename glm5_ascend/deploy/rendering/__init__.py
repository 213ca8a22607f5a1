"""Renders a profile as files for shells, containers, Kubernetes and systemd."""
