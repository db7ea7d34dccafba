"""`tfdist-plan`: the layout, cost and duration of a training."""
