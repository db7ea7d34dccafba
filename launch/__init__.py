"""Programs: `tfdist-run`, `tfdist-train` and `tfdist-install-horovod`."""
