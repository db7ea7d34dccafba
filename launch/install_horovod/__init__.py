"""`tfdist-install-horovod`: builds Horovod and the compiled operations of tfdist."""
