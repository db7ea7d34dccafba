"""`tfdist-launch`: what schedulers of clusters want to be told, written from flags."""
