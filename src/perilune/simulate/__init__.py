"""Simulation: whole RL runs and serving, predicted with the scheduler, pools and admission rule that run."""
