"""Programs that ranks run, for figures that only a run has."""
