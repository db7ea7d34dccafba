"""`tfdist-bench`: measures what this machine and its links do, and how a training scales on them."""
