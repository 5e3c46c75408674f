"""Predicts RL runs and serving by simulation, with the real scheduler, block pools and admission rule."""
