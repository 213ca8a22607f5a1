"""What `bench_peers.py` builds, makes and runs; nothing of a peer is part of this repository."""
