"""The programs, such as `tfdist-run`, `tfdist-train` and `tfdist-plan`; the one room that defines flags."""

if __name__ != "tfdist.launch":
    raise ImportError("This package is imported as `tfdist.launch`, not as `launch`.")
