"""Optimizers with local steps between syncs of the ranks: LocalSGD, SlowMo and DiLoCo."""
