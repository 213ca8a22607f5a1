"""A profile as files that shells, containers, Kubernetes and systemd take."""
