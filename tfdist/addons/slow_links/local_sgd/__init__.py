"""Optimizers whose ranks train apart for some steps: LocalSGD, SlowMo and DiLoCo."""
