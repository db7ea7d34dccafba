"""`tfdist-run`: starts ranks on one or more hosts, watches them and restarts them."""
