"""The command-line programs, such as `tfdist-run`, `tfdist-train` and `tfdist-plan`, and their flags."""

if __name__ != "tfdist.launch":
    raise ImportError("This package must be imported as `tfdist.launch`, not as `launch`.")
