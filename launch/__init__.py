"""Programs: `tfdist-run`, `tfdist-train` and `tfdist-install-horovod`."""

if __name__ != "tfdist.launch":
    raise ImportError("This package is imported as `tfdist.launch`, not as `launch`.")
