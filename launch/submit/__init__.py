"""`tfdist-launch`: job descriptions for the schedulers of clusters, written from flags."""
